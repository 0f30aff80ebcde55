"""What differs between the versions of torch that `supported.py` names. docs/torch.md lists it all."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey, _FunctionBase
from torch._C._dynamo import eval_frame
from torch._functorch import utils as functorch_utils
from torch._ops import HigherOrderOperator
from torch.autograd.function import Function
from torch.nn.attention import flex_attention as torch_flex

from . import supported

KERNEL_HINTS = frozenset(torch_flex.FlexKernelOptions.__annotations__)

# Until 2.12 a float computed from changing floats is a constant, unless it is a sum or product of tensors.
COMPUTED_FLOATS_ARE_CONSTANTS = supported.TORCH < (2, 13)


def block_mask_parts(flat: Sequence[Any]) -> tuple[tuple, Callable]:
    """`BlockMask.as_tuple()`, which is among the arguments of torch's op, as (schedule, mask_mod).

    2.11 has 13 entries: two lengths, eight lists, two block sizes, mask_mod. 2.13 puts four
    about the order of dq writes before the block sizes.
    """
    return (flat[-3], flat[-2], *flat[2:10]), flat[-1]


def is_sliced(block_mask: Any) -> bool:
    """Whether the mask was sliced: torch then replaces its mask_mod by a function that raises."""
    marker = getattr(torch_flex, "_sliced_mask_mod_error", None)
    return block_mask.mask_mod is None or (marker is not None and block_mask.mask_mod is marker)


def mark_changing(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Let the size of `tensor` in `dim` change in compiled code: Dynamo's maybe_mark_dynamic, without its import."""
    tensor._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    return tensor


def run_while_traced(function: Callable) -> Callable:
    """Have Dynamo call `function` instead of tracing it: torch.compiler.assume_constant_result, without its import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_no_frame_of(function: Any, calls: bool = False) -> None:
    """Have Dynamo run `function` as it is where it does not inline it, and with `calls` all that it calls."""
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if calls else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def drop_guards_on_constants(package: str) -> None:
    """Keep the graph that Dynamo is compiling from looking at the constants of a package in each call.

    They are functions, classes, and what has a name in capitals, with all that is inside of them.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    state = context.guards_context.copy_graphstate()
    constant = {g for g in state.dynamo_guards if _is_constant_of(package, g.originating_source)}
    state.dynamo_guards = state.dynamo_guards - constant
    context.guards_context.restore_graphstate(state)


_CONSTANT = (ModuleType, FunctionType, BuiltinFunctionType, type, torch.dtype, HigherOrderOperator)


def _is_constant_of(package: str, source: Any) -> bool:
    from torch._dynamo.source import AttrSource, ChainedSource, GlobalSource

    links = []
    while isinstance(source, ChainedSource):
        links.append(source)
        source = source.base
    name = source.global_name if isinstance(source, GlobalSource) else ""
    if not f"{name}_dot_".startswith(f"__import_{package}_dot_"):
        return False
    found: Any = sys.modules.get(name.removeprefix("__import_").replace("_dot_", "."))
    for link in reversed(links):
        if not isinstance(found, ModuleType):
            break
        if not isinstance(link, AttrSource):
            return False
        found = getattr(found, link.member)
        if not isinstance(found, _CONSTANT) and not link.member.strip("_").isupper():
            return False
    return found is not None


def allows_tf32() -> bool:
    """Whether the user lets GPUs multiply float32 matrices in TF32.

    Reads the newest of torch's settings. It follows the older ones; those raise when read after it was set.
    """
    return torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"


def compile_alone() -> contextlib.AbstractContextManager:
    """Compile without the other ranks: 2.12 compares the graphs of all, and waits for those that compile none."""
    from torch._inductor import config

    setting = "aten_distributed_optimizations.spmd_check"
    known = hasattr(config.aten_distributed_optimizations, "spmd_check")
    return config.patch({setting: False}) if known else contextlib.nullcontext()


def inductor_option_names() -> frozenset[str]:
    import torch._inductor

    return frozenset(torch._inductor.list_options())


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs callbacks once a module has been imported, and stays out of the way otherwise."""

    def __init__(self, name: str):
        self.name = name
        self.callbacks: list[Callable[[ModuleType], Any]] = []

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        self.loader: importlib.abc.Loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.run(module)

    def run(self, module):
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        while self.callbacks:
            try:
                self.callbacks.pop(0)(module)
            except Exception as error:  # or the import of torch's own module would fail
                if not supported.UNTESTED:
                    raise
                failed_when_imported.append(supported.refused("its part in Dynamo or Inductor", error))


failed_when_imported: list[str] = []  # why compiled calls are refused with a torch that was not tested


def when_imported(name: str, callback: Callable[[ModuleType], Any]) -> None:
    """Call `callback(module)` when `name` is imported, or now if it has been.

    Dynamo and Inductor take a second to import, so nothing of ours imports them before they are used.
    """
    waiting = next((f for f in sys.meta_path if isinstance(f, _AfterImport) and f.name == name), None)
    if waiting is None:
        waiting = _AfterImport(name)
        sys.meta_path.insert(0, waiting)
    waiting.callbacks.append(callback)
    if name in sys.modules:
        __import__(name)  # waits where another thread has begun to import it
        waiting.run(sys.modules[name])


def change_function_arguments(change: Callable[[tuple], tuple]) -> None:
    """Have autograd.Functions run on `change(args)` instead of `args`.

    Up to 2.13 `apply` is Python and calls a helper, which is replaced: this reaches every name that is bound to some
    `Function.apply`. From 2.14 on it is C++, so `apply` itself is replaced, and names bound before are not reached.
    """
    if hasattr(Function.apply, "__func__"):
        unwrap = functorch_utils.unwrap_dead_wrappers

        @functools.wraps(unwrap)
        def unwrap_dead_wrappers(args: tuple) -> tuple:
            return unwrap(change(args))

        functorch_utils.unwrap_dead_wrappers = unwrap_dead_wrappers
        return
    native = _FunctionBase.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = change((*args, *kwargs.values()))
        return native.__get__(None, cls)(
            *given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True))
        )

    compile_no_frame_of(apply)  # otherwise Dynamo would trace from here what it does not trace whole
    setattr(Function, "apply", classmethod(apply))  # noqa: B010 (a method is assigned to by name)


def checks_what_it_computed(kernel: Any) -> Any:
    """A kernel of Inductor's C++ that computes each index again to check it.

    Checks come with the loads, before all computations. Until 2.12 they may name what is computed after them.
    """
    check_bounds = kernel.check_bounds

    def check(*args: Any) -> None:
        with patch.object(kernel.cse, "_cache", {}):
            check_bounds(*args)

    kernel.check_bounds = check
    return kernel


def register_dynamo_variable(op: Any, variable_class: Any) -> None:
    from torch._dynamo.variables import higher_order_ops

    higher_order_ops._hop_name_to_variable_class[op.__name__] = variable_class


def out_of_dynamo(tx: Any, error: Exception) -> Exception:
    """The exception to raise while Dynamo traces, so that the user gets `error` with a note of the lines that led to
    it."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(tx.format_frame_summary())
    return through_dynamo(error)


def dynamo_constant(tx: Any, value: Any) -> Any:
    """Dynamo's stand-in for a Python constant."""
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, value)


def runtime_errors_of_dynamo() -> tuple[type[Exception], ...]:
    """What Dynamo raises where an operation on fake tensors fails; from 2.14 on a traced `except` may catch it."""
    from torch._dynamo import exc

    observed = getattr(exc, "FakeTensorObservedException", exc.TorchRuntimeError)
    return (exc.TorchRuntimeError, observed)


def bound_to(method: Any) -> Any:
    """What Dynamo's stand-in for a method is bound to: `obj` up to 2.14, `im_self` from 2.15 on."""
    return method.im_self if hasattr(method, "im_self") else method.obj


def dynamo_attribute(tx: Any, variable: Any, name: str) -> Any:
    """Dynamo's stand-in for an attribute: variables have a method for it up to 2.13, the builtin asks from 2.14 on."""
    if hasattr(variable, "var_getattr"):
        return variable.var_getattr(tx, name)
    return dynamo_constant(tx, getattr).call_function(tx, [variable, dynamo_constant(tx, name)], {})


def breaks_are_errors(tx: Any) -> bool:
    """Whether Dynamo may not break the graph here: fullgraph=True and the like."""
    return tx.output.root_tx.one_graph or getattr(tx, "error_on_graph_break", False)


def through_dynamo(error: Exception) -> Exception:
    """The exception to raise below Dynamo, so that the user gets `error` without Dynamo's words and frames."""
    from torch._dynamo.exc import ShortenTraceback

    class Through(ShortenTraceback):
        def remove_dynamo_frames(self) -> Any:
            return error.with_traceback(None)

    return Through(str(error), first_useful_frame=None)


def outside_graphs(function: Callable) -> Callable:
    """torch.compiler.disable, applied only once Dynamo is imported: it imports Dynamo itself, which takes a second."""
    called = function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    def disable(dynamo: ModuleType) -> None:
        nonlocal called
        called = dynamo.disable(function)

    when_imported("torch._dynamo", disable)
    return run


def is_exporting() -> bool:
    """Whether torch.export is tracing what runs: no other tracer works above autograd."""
    return torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is not None


def needs_a_value(error: Exception) -> bool:
    """Whether Dynamo gave up because Python asks for the value of a tensor."""
    return any(text in str(error) for text in ("ata-dependent", "Indexing list with non-scalar tensor"))


def is_cpp_failure(error: BaseException | None) -> bool:
    """Whether Inductor found no C++ compiler, or the compiler failed."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    while error is not None and not isinstance(error, (CppCompileError, InvalidCxxCompiler)):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error is not None


def is_untraced_number(error: Exception) -> bool:
    """Whether a trace failed on a changing number that was made outside of it."""
    return "is not tracked with proxy" in str(error)


def recompile_reason() -> str | None:
    """Which guard made Dynamo compile again what it is compiling; None where it compiles for the first time."""
    from torch._dynamo.utils import get_metrics_context

    return get_metrics_context()._metrics.get("recompile_reason")


_VMAP_KEYS = (
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchBatchedDecomposition,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchVmapMode,
)


def vmap_allowed() -> Any:
    """Lets torch.vmap work inside a TorchDispatchMode."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _VMAP_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
