"""From a score_mod or mask_mod to FX graphs: its value, and its joint graph for the backward.

A mod is a function of one *lane*, that is of one score: 0-d tensors in, one 0-d tensor out.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _len_torch_function_stack
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from .. import compat, errors
from .lookups import as_indexing
from .tracer import Tracer

SCORE_LANES = ("score", "b", "h", "q_idx", "kv_idx")
MASK_LANES = SCORE_LANES[1:]
JOINT_LANES = (*SCORE_LANES, "grad_score")
INDEX_DTYPE = torch.int32


def score_dtype(input_dtype: torch.dtype) -> torch.dtype:
    """Scores, softmax and accumulators are fp32, or fp64 for fp64 inputs."""
    return torch.float64 if input_dtype == torch.float64 else torch.float32


def number_dtype(value: Any, query: Tensor) -> torch.dtype | None:
    """The dtype of the 0-d tensor that stands for a number; None for what is not one."""
    if isinstance(value, (float, torch.SymFloat)):
        return score_dtype(query.dtype)
    return torch.int64 if isinstance(value, (int, torch.SymInt)) else None


def is_lane_index(index: Any) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dim() == 0
        and not index.dtype.is_floating_point
        and index.dtype != torch.bool
    )


class LaneIndexing(TorchFunctionMode):
    """Lets a mod index a captured tensor by 0-d tensors without turning them into Python numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, key, *value = args
            key = key if isinstance(key, tuple) else (key,)
            if any(is_lane_index(index) for index in key):
                return _index_by_lanes(tensor, key, *value)
        if func in (torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip):
            return _clamp(*args, **kwargs)
        found = as_indexing(func, args, kwargs)
        return func(*args, **kwargs) if found is None else found


def _index_by_lanes(tensor: Tensor, key: tuple, *value: Any) -> Tensor:
    """`tensor[key]`, or `tensor[key] = value`."""
    if Ellipsis in [index for index in key if not isinstance(index, Tensor)]:
        at = next(i for i, index in enumerate(key) if index is Ellipsis)
        named = sum(index is not None for index in key) - 1
        key = key[:at] + (slice(None),) * (tensor.dim() - named) + key[at + 1 :]
    # What is not a lane index applies first; the dimensions the lanes index then come to the front.
    others = tuple(
        # Tensor.__getitem__ would make a constant of a symbol.
        slice(None) if is_lane_index(index) or isinstance(index, torch.SymInt) else index
        for index in key
    )
    if not all(isinstance(index, slice) and index == slice(None) for index in others):
        tensor = tensor[others]
    surviving = [index for index in key if not isinstance(index, int)]
    for dim in reversed(range(len(surviving))):
        if isinstance(surviving[dim], torch.SymInt):
            tensor = tensor.select(dim, surviving.pop(dim))
    dims = [dim for dim, index in enumerate(surviving) if is_lane_index(index)]
    if dims != list(range(len(dims))):
        tensor = tensor.permute(*dims, *(dim for dim in range(tensor.dim()) if dim not in dims))
    indices = [surviving[dim] for dim in dims]
    if value:
        filler = torch.as_tensor(value[0], dtype=tensor.dtype, device=tensor.device)
        return torch.ops.aten.index_put_(tensor, indices, filler)
    return torch.ops.aten.index.Tensor(tensor, indices)


def _clamp(tensor, min=None, max=None):
    # A number that was lifted is a 0-d tensor by now; torch takes two numbers or two tensors.
    if isinstance(min, Tensor) != isinstance(max, Tensor) and min is not None and max is not None:
        min, max = (torch.as_tensor(bound, device=tensor.device) for bound in (min, max))
    return torch.clamp(tensor, min, max)


@contextlib.contextmanager
def apart_from_surrounding_trace() -> Iterator[None]:
    """Nothing around (a trace, functionalization, any mode, functorch, autocast) sees what happens inside."""
    with (
        suspend_functionalization(),
        _disable_current_modes(),
        _without_tracers_functions(),
        _plain_saved_tensors(),
        _plain_backward(),
        temporarily_clear_interpreter_stack(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
        torch.inference_mode(False),
    ):
        yield


@contextlib.contextmanager
def _without_tracers_functions() -> Iterator[None]:
    """Takes away the torch function modes of an export, which would record switches of autograd and autocast."""
    with contextlib.ExitStack() as stack:
        modes = [stack.enter_context(_pop_mode_temporarily()) for _ in range(_len_torch_function_stack())]
        for mode in reversed(modes):
            if not type(mode).__module__.startswith(("torch.fx.", "torch._export.")):
                stack.enter_context(mode)
        yield


def _plain_saved_tensors() -> Any:
    """Replaces the hooks by which a checkpoint saves tensors; torch.func.grad leaves none to replace."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return saved_tensors_hooks(_packed, _unpacked)


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    """What autograd does itself where there are no hooks: a value that has changed since gives a wrong gradient."""
    tensor, version = packed
    if tensor._version != version:
        raise errors.value_overwritten()
    return tensor


def _plain_backward() -> Any:
    """Keeps compiled autograd, where it is on, from compiling the derivative of a mod."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    # It is on or off for the whole process: where it is off, no other thread may see it touched.
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return contextlib.nullcontext()
    return compiled_autograd._disable()


def example_lanes(like: Tensor, names: Sequence[str]) -> list[Tensor]:
    """One 0-d tensor for each lane argument, with the dtypes the kernels use."""
    floats = score_dtype(like.dtype)
    return [
        torch.zeros((), dtype=floats if "score" in name else INDEX_DTYPE, device=like.device)
        for name in names
    ]


def _fake_like(capture: Any, fake_mode: FakeTensorMode) -> Any:
    if not isinstance(capture, Tensor):
        return capture
    with fake_mode:
        return torch.empty_strided(
            capture.size(), capture.stride(), dtype=capture.dtype, device=capture.device
        )


def trace_mod(mod: Callable, lanes: Sequence[str], query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    """The FX graph of `mod(*lanes, *captures)`, which holds aten ops only."""

    tracer = Tracer()
    run = tracer.keeping_lines(mod)

    def value(*args):
        with LaneIndexing():
            return run(*args)

    return _trace(tracer, value, lanes, query, captures)


def trace_joint(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """The FX graph `(score, b, h, q_idx, kv_idx, grad, *captures) -> (d score, *d captures)`.

    `score_mod` itself is differentiated, not its graph: custom autograd.Functions keep their backward.
    `wanted` is for the score and each capture. A capture that is not wanted, or that the score does not depend
    on, has None for its gradient; d score is then zero.
    """

    tracer = Tracer()
    run = tracer.keeping_lines(score_mod)

    def joint(score, b, h, q_idx, kv_idx, grad, *captures):
        inputs = [
            tensor.detach().requires_grad_() if want else tensor
            for tensor, want in zip((score, *captures), wanted, strict=True)
        ]
        sources = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
        grads: Sequence[Tensor | None] = (None,) * len(sources)
        with torch.enable_grad(), LaneIndexing():
            new_score = run(inputs[0].clone(), b, h, q_idx, kv_idx, *inputs[1:])
            errors.check_mod_result("score_mod", new_score)
            if new_score.requires_grad:
                grads = torch.autograd.grad(new_score, sources, grad.to(new_score.dtype), allow_unused=True)
        found = iter(grads)
        d_score, *d_captures = (next(found) if want else None for want in wanted)
        return torch.zeros_like(score) if d_score is None else d_score, *d_captures

    return _trace(tracer, joint, JOINT_LANES, query, captures)


def _trace(
    tracer: Tracer, fn: Callable, lanes: Sequence[str], query: Tensor, captures: Sequence[Any]
) -> fx.GraphModule:
    tensors = [query, *(c for c in captures if isinstance(c, Tensor))]
    with apart_from_surrounding_trace():
        fake_mode = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            args = example_lanes(query, lanes)
        args += [_fake_like(capture, fake_mode) for capture in captures]
        with fake_mode, numbers_known():
            graph = tracer.trace_call(fn, args)
            if _writes_to_views(graph):
                module, tracer = fx.GraphModule(tracer.root, graph), Tracer()
                graph = tracer.trace_call(torch.func.functionalize(tracer.keeping_lines(module)), args)
        _tidy(graph, tracer.root, len(lanes))
        return fx.GraphModule(tracer.root, graph)


@contextlib.contextmanager
def numbers_known() -> Iterator[None]:
    """Around a trace of a mod: refuses arithmetic inside it on numbers of a surrounding trace."""
    try:
        yield
    except RuntimeError as error:
        if not compat.is_untraced_number(error):
            raise
        raise errors.number_in_mod() from error


_COPIES = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh_copy.default,
)


def _out_of_place(target: Any) -> Any:
    """For the in-place form of a pointwise op, such as add_, the form that returns its result; else None."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    returning = getattr(packet, target._overloadname, None)
    # The in-place form itself is not always tagged: masked_fill_ is not.
    pointwise = torch.Tag.pointwise in getattr(returning, "tags", ()) or name in ("fill_", "zero_", "copy_")
    return returning if pointwise else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _tidy(graph: fx.Graph, root: torch.nn.Module, lanes: int) -> None:
    """Drop what tracing leaves behind: copies, 0-d constants kept as attributes, writes to a lane's own values."""
    captures = [node for node in graph.nodes if node.op == "placeholder"][lanes:]
    for node in list(graph.nodes):
        if node.target in _COPIES or (
            node.target is torch.ops.aten.clone.default and _is_number(node.meta["val"])
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "get_attr":
            constant = getattr(root, node.target)
            node.meta.setdefault("val", constant)
            if not _is_number(constant):
                continue
            with graph.inserting_before(node):
                literal = graph.call_function(
                    torch.ops.aten.full.default,
                    ([], constant.item()),
                    {"dtype": constant.dtype, "device": constant.device},
                )
            literal.meta["val"] = constant
            node.replace_all_uses_with(literal)
            graph.erase_node(node)
        elif (returning := _out_of_place(node.target)) and _storage_of(node.args[0]) not in captures:
            node.target = returning
    graph.eliminate_dead_code()


def written_placeholder(module: fx.GraphModule) -> tuple[int, str] | None:
    """The first placeholder that the graph writes to, by position, and the op that does.

    In-place operations on what a lane computes itself are gone from a traced graph.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, written in _writes(module.graph):
        storage = _storage_of(written)
        if storage in placeholders:
            return placeholders.index(storage), str(node.target)
    return None


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node that writes, and what it writes to."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        arguments = node.target._schema.arguments
        given = {**dict(zip([a.name for a in arguments], node.args, strict=False)), **node.kwargs}
        for argument in arguments:
            written = given.get(argument.name)
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(written, fx.Node)
            ):
                yield node, written


def _writes_to_views(graph: fx.Graph) -> bool:
    """Whether a part of a tensor that the graph made is written to: the tensor must change with it."""
    return any(
        written is not (storage := _storage_of(written)) and storage.op != "placeholder"
        for _, written in _writes(graph)
    )


def random_op(module: fx.GraphModule) -> str | None:
    """The first op of the graph that draws random numbers."""
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node.target)
    return None


def number_beyond(module: fx.GraphModule) -> tuple[float, torch.dtype] | None:
    """The first number beyond the dtype that it meets: torch makes infinity, another integer or an error of it."""
    for node in module.graph.nodes:
        tensors = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        dtypes = [t.dtype for t in tensors if isinstance(t, Tensor)]
        dtypes = [dtype for dtype in dtypes if dtype != torch.bool and not dtype.is_complex]
        if not dtypes or node.target is torch.ops.aten._to_copy.default:
            continue
        if floats := [dtype for dtype in dtypes if dtype.is_floating_point]:
            widest = max(floats, key=lambda dtype: torch.finfo(dtype).max)
            least, most = -torch.finfo(widest).max, torch.finfo(widest).max
            numbers: list[Any] = [
                n for n in tree_iter((node.args, node.kwargs)) if isinstance(n, float) and math.isfinite(n)
            ]
        else:
            widest = max(dtypes, key=lambda dtype: torch.iinfo(dtype).max)
            least, most = torch.iinfo(widest).min, torch.iinfo(widest).max
            numbers = _integers_computed_with(node)
        for number in numbers:
            if not least <= number <= most:
                return number, widest
    return None


def _integers_computed_with(node: fx.Node) -> list[int]:
    """Those among the arguments of `node` that are no sizes, dimensions or ends of slices."""
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    given = {**dict(zip([a.name for a in arguments], node.args, strict=False)), **node.kwargs}
    values = [given.get(a.name) for a in arguments if str(a.type).removeprefix("Optional") in _VALUES]
    return [value for value in values if isinstance(value, int)]


_VALUES = ("number", "[number]", "Tensor", "[Tensor]")  # types of arguments


def _storage_of(node: Any) -> Any:
    """The placeholder that `node` is a view of."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(a.alias_info for a in schema.arguments):
            return node
        node = node.args[0]
    return node
