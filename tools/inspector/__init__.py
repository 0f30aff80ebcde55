"""flex_inductor.inspect: what a function's attention calls become, for a device that need not be there."""

from __future__ import annotations

import functools
import inspect as signatures
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from flex_inductor import errors as call_errors
from flex_inductor.lowerings.decision import Choice, Decision
from flex_inductor.masks.planned import PlannedMask

from .. import env, errors
from ..generated import GeneratedKernel
from ..resources import TARGETS, Resources, compile_untuned
from .calls import facts_of
from .compiling import Source, Watched, watch
from .model import Call, Kernel
from .report import Report

__all__ = ["Call", "Kernel", "Report", "attention_kernels", "inspect", "kind"]

KNOWN_TARGETS = ("cpu", *TARGETS)


def inspect(
    fn: Callable,
    *args: Any,
    target: str | None = None,
    backward: bool = True,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Say what the attention calls of `fn(*args, **kwargs)` become: decisions, graphs, schedules and kernels.

    `fn` is traced afresh and not run. The backward is there where an argument, a parameter or a captured tensor
    requires a gradient.

    Args:
        fn: a function or a module that compiles as one graph.
        args, kwargs: what it is called with.
        target: "cpu" or a GPU's architecture such as "sm_90", by default the device of the tensors. For a GPU that is
            not there give CPU tensors of the shapes and dtypes in question.
        backward: False leaves the backward out.
        options: those of the backend, as `torch.compile(..., options=...)` takes them.

    Returns:
        flex_inductor.tools.inspector.Report: `print` it for a page; see docs/inspector.md.

    Raises:
        FlexValueError: `fn` makes no call, is not one graph, or the target does not fit the tensors.
        FlexRuntimeError: triton is missing, for a GPU's kernels.

    Example:
        >>> query = torch.randn(1, 2, 64, 16)
        >>> def attend(query):
        ...     return flex_attention(query, query, query, mods.softcap(20.0))
        >>> report = flex_inductor.inspect(attend, query, target="cpu")
        >>> report.calls[0].decision.chosen, [kernel.kind for kernel in report.kernels]
        ('cpu', ['forward'])
    """
    target = _target(fn, args, kwargs, target)
    watched = watch(fn, args, kwargs, target, backward, options)
    if not watched.calls:
        raise errors.no_attention_call(getattr(fn, "__qualname__", type(fn).__name__))
    facts = {
        number: facts_of(node, watched.module, watched.inputs)
        for number, node in enumerate(watched.calls)
        if number in watched.lowered  # else its results are not used
    }
    kernels = _kernels(
        watched, target, {number: call.values.inputs.schedule for number, call in facts.items()}
    )
    calls = []
    for number, call in facts.items():
        lowered = watched.lowered[number]
        own = dict.fromkeys(source for one in lowered.values() for source in one.kernels)
        calls.append(Call(number, call, dict(lowered), [kernels[source] for source in own], target))
    return Report(target, calls, env.packages(), _plans(fn, args, kwargs))


def attention_kernels(
    fn: Callable,
    *args: Any,
    target: str,
    backward: bool = True,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[GeneratedKernel]:
    """Give every distinct attention kernel that Inductor generates for a GPU, not compiled.

    Args:
        fn, args, kwargs, backward, options: as in `inspect`.
        target: a GPU's architecture such as "sm_90".

    Returns:
        list: of `GeneratedKernel`.

    Example:
        >>> from flex_inductor.tools.inspector import attention_kernels, kind
        >>> query = torch.randn(1, 2, 64, 16)
        >>> kernels = attention_kernels(flex_attention, query, query, query, target="sm_90")
        >>> [kind(kernel) for kernel in kernels]
        ['forward']
    """
    watched = watch(fn, args, kwargs, target, backward, options)
    return [source.triton for source in watched.choices if source.triton is not None]


def kind(kernel: GeneratedKernel) -> str:
    """Give what a kernel computes: forward, decode, combine, backward_dq or backward_dkdv.

    Args:
        kernel: of `attention_kernels`.

    Example:
        >>> from flex_inductor.tools.inspector import attention_kernels, kind
        >>> query = torch.randn(1, 2, 64, 16, requires_grad=True)
        >>> kernels = attention_kernels(flex_attention, query, query, query, target="sm_90")
        >>> sorted({kind(kernel) for kernel in kernels})
        ['backward_dkdv', 'backward_dq', 'forward']
    """
    return kernel.inductor_meta.get("flex_inductor", {}).get("kind", "")


def _plans(fn: Callable, args: Any, kwargs: Any) -> list[Decision]:
    """How the masks that `fn` is given, or finds around itself, were planned for several ranks."""
    around: Any = getattr(fn, "__dict__", {})
    if signatures.isfunction(fn):
        around = signatures.getclosurevars(fn).nonlocals, fn.__defaults__
    values = tree_iter((args, kwargs, around), is_leaf=lambda value: isinstance(value, PlannedMask))
    choices = [mask.choice for mask in values if isinstance(mask, PlannedMask) and mask.choice is not None]
    return [Decision(*choice) for choice in dict.fromkeys(choices)]


def _target(fn: Callable, args: Any, kwargs: Any, target: str | None) -> str:
    """The target, checked against where the tensors are."""
    given = [args, kwargs, [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else ()]
    devices = sorted({t.device.type for t in tree_iter(given) if isinstance(t, Tensor)})
    if len(devices) > 1:
        raise errors.mixed_devices(devices)
    there = devices[0] if devices else "cpu"
    if there not in ("cpu", "cuda"):
        raise call_errors.bad_argument("arguments", "tensors on cpu or cuda", f"some on {there}")
    if there == "cuda":
        from flex_inductor.lowerings.triton.device import current_device

        own = current_device(torch.device("cuda")).arch
        if target not in (None, own):
            raise errors.not_this_device(target, own)
        return own
    if target not in (None, *KNOWN_TARGETS):
        raise call_errors.bad_argument("target", f"one of {', '.join(KNOWN_TARGETS)}", repr(target))
    return target or "cpu"


def _kernels(watched: Watched, target: str, schedules: dict[int, Any]) -> dict[Source, Kernel]:
    build = _cpu_kernel if target == "cpu" else _gpu_kernel
    with ThreadPoolExecutor() as pool:  # compilers are other processes, or leave Python's lock alone
        built = {
            source: pool.submit(build, source, choice, target, schedules[source.call])
            for source, choice in watched.choices.items()
        }
        return {source: kernel.result() for source, kernel in built.items()}


def _gpu_kernel(source: Source, choice: Choice | None, target: str, schedule: Any) -> Kernel:
    import triton
    from torch._inductor.runtime.triton_heuristics import config_from_dict

    from flex_inductor.lowerings.triton.configs import describe, launched_with

    assert source.triton is not None
    config, _, found = compile_untuned(source.triton, target)
    first = source.triton.configs[0]
    if choice is not None and config != first:
        settled, left = (launched_with(config_from_dict(c)) for c in (config, first))
        shared = settled == left._replace(coalesced=1)
        why = "threads share scores" if shared else "more local memory"
        choice = choice._replace(config=settled._asdict(), why=f"{describe(left)}: {why}")
    return Kernel(
        source, target, config, choice, found, f"triton {triton.__version__} for {target}", schedule
    )


def _cpu_kernel(source: Source, choice: Choice | None, target: str, schedule: Any) -> Kernel:
    names = ("registers", "spill_bytes", "shared_bytes", "instructions")
    found = Resources(reasons=dict.fromkeys(names, "a CPU's compiler is not asked"))
    return Kernel(source, target, choice.config if choice else {}, choice, found, _built_with(), schedule)


@functools.cache
def _built_with() -> str:
    """The compiler that Inductor uses here, and its vectors."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    isa = pick_vec_isa()
    vectors = f"{isa} vectors of {isa.bit_width()} bits" if isa else "no vectors"
    return f"{env.compiler_version(get_cpp_compiler())}, {vectors}"
