"""Models with our attention as ONNX: each call as the preview domain's FlexAttention, or as dense attention.

The exporter of torch carries a call through as a node of text. Here that node becomes FlexAttention, with both mods as
graphs in it, if they read nothing but constants. It has no place for a capture that is computed, nor for a logsumexp:
such a call becomes a function of ordinary operations, which has a matrix of scores.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..mod_ir import serialise
from ..op import call_text
from ..op.call_text import Graphs
from ..reference import over_lanes
from ..visits import Bounds
from . import check_version, errors

try:
    import onnx
    import onnx_ir as ir
    import onnxscript  # noqa: F401 - torch's exporter needs it
    from onnx_ir import convenience
except ImportError as error:
    raise errors.missing("onnx", "1.23", error) from error

__all__ = ["export"]

TESTED = "1.23"
PREVIEW = "ai.onnx.preview"
OURS = "flex_inductor"

_SAVED = torch.ops.flex_inductor.saved_attention.default
_LISTS = torch.ops.flex_inductor.block_lists.default
_SERVED = {"score_captures", "mask_captures", "schedule"}


def export(
    model: nn.Module, args: tuple[Any, ...], *, dynamic_shapes: Any = None, opset_version: int = 20
) -> torch.onnx.ONNXProgram:
    """Export a model as ONNX, with its calls of flex_attention as the preview domain's FlexAttention.

    Warns where a call becomes dense attention, with the reason.

    Args:
        model: on CPU, with calls of `flex_inductor.flex_attention`.
        args: what it is called with.
        dynamic_shapes: as torch.export.export has it.
        opset_version: of ONNX's operators.

    Returns:
        torch.onnx.ONNXProgram: save it with `.save(path)`.

    Raises:
        FlexNotImplementedError: a call has inputs that ONNX has no place for, such as sinks.

    Example:
        >>> from flex_inductor.integrations import onnx as ours
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query):
        ...         return flex_attention(query, query, query, mods.softcap(20.0))
        >>> program = ours.export(Attention(), (torch.randn(1, 2, 8, 16),))
        >>> [node.op_type for node in program.model.graph]
        ['FlexAttention']
    """
    check_version("onnx", onnx.__version__, TESTED)
    with torch.no_grad():
        exported = torch.export.export(model, args, dynamic_shapes=dynamic_shapes, strict=False)
        for node in exported.graph.find_nodes(op="call_function", target=_SAVED):
            _drop_schedule(node)
        exported = exported.run_decompositions({_SAVED: _as_node})
        program = _to_onnx(exported, opset_version=opset_version)
        for number, call in enumerate(n for n in [*program.model.graph] if n.domain == OURS):
            _replace(program.model, call, number, opset_version)
    program.model.opset_imports.pop(OURS, None)
    return program


def _to_onnx(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own code
        return torch.onnx.export(*args, dynamo=True, verbose=False, **options)


def _drop_schedule(node: torch.fx.Node) -> None:
    """Drop what follows from the mask: bounds, and lists that the model makes."""
    query, key, value, tensors, text = node.args
    values = [tensor.meta["val"] for tensor in tensors]
    call = call_text.load(text, values, Graphs)
    unserved = [*(set(call.inputs.given()) - _SERVED), *call.options.more]
    if unserved:
        raise errors.not_in_onnx(unserved)
    schedule = call.inputs.schedule
    made = [source for tensor in tensors for source in tensor.all_input_nodes if source.target is _LISTS]
    if schedule is None or not (made or isinstance(schedule, Bounds)):
        return
    if made and serialise.load(made[0].args[1])["mask"] != call.data["mask"]:
        raise errors.not_in_onnx(["blocks of another mask_mod, made as it runs"])
    captures = len(call.inputs.score_captures) + len(call.inputs.mask_captures)
    node.args = (query, key, value, tensors[:captures], call_text.without_schedule(text))


def _as_node(query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], text: str) -> list[Tensor]:
    """The call as a node that torch's exporter carries through."""
    batch, heads, queries, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (batch, heads, queries)
    found = torch.onnx.ops.symbolic_multi_out(
        f"{OURS}::Attention",
        [query, key, value, *tensors],
        {"call": text},
        dtypes=[query.dtype, wide, wide],
        shapes=[(*rows, value.size(-1)), rows, rows],
        version=1,
    )
    return [*found]


def _replace(model: ir.Model, node: ir.Node, number: int, opset_version: int) -> None:
    text = node.attributes["call"].as_string()
    query, key, value, *tensors = node.inputs
    constants: list[Any] = [_constant(tensor) for tensor in tensors]
    examples = _examples(node.inputs)
    reason = None
    if any(constant is None for constant in constants):
        reason = "a mod or a mask reads what the model computes"
    elif any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        reason = "its logsumexp or maximum is read"
    elif key.shape[0] != query.shape[0]:
        reason = "all batches share its keys"
    if reason is not None:
        warnings.warn(errors.dense_in_onnx(reason), stacklevel=3)
        dense = _traced(_Dense(text), examples, f"attention_{number}", opset_version)
        _inline(model.graph, node, dense)
        return
    call = call_text.load(text, constants, Graphs)
    (of_query, query_changes), (of_key, key_changes) = examples[:2]
    wide = torch.promote_types(of_query.dtype, torch.float32)
    scores = torch.ones(*of_query.shape[:3], of_key.size(2), dtype=wide), (*query_changes[:3], key_changes[2])
    attributes = [ir.AttrFloat32("scale", call.scale)]
    if call.mods.score is not None or _masks(call):
        graph = _traced(_ScoreMod(call), [scores], f"score_mod_{number}", opset_version)
        attributes.append(ir.AttrGraph("score_mod", graph))
    if _masks(call):
        graph = _traced(_ProbMod(call), [scores], f"prob_mod_{number}", opset_version)
        attributes.append(ir.AttrGraph("prob_mod", graph))
    made = ir.Node(PREVIEW, "FlexAttention", [query, key, value], attributes, name=f"attention_{number}")
    made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    _put(model.graph, node, [made], [made.outputs[0]])
    model.opset_imports[PREVIEW] = 1


class _ScoreMod(nn.Module):
    """Both mods on a matrix of scores. A row that sees nothing keeps its scores, and `_ProbMod` makes it 0."""

    def __init__(self, call: Any):
        super().__init__()
        self.call = call

    def forward(self, scores: Tensor) -> Tensor:
        if self.call.mods.score is not None:
            function = _function(self.call.mods.score, self.call.inputs.score_captures)
            scores = over_lanes(function, (0,))(scores, *_indices(scores))
        if _masks(self.call):
            live = _live(self.call, scores)
            scores = torch.where(live | ~live.any(-1, keepdim=True), scores, -math.inf)
        return scores


class _ProbMod(nn.Module):
    def __init__(self, call: Any):
        super().__init__()
        self.call = call

    def forward(self, weights: Tensor) -> Tensor:
        return torch.where(_live(self.call, weights).any(-1, keepdim=True), weights, 0.0)


class _Dense(nn.Module):
    """The call in ordinary operations."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = call_text.load(self.text, tensors, Graphs)
        wide = torch.promote_types(query.dtype, torch.float32)
        groups = query.size(1) // key.size(1)
        key, value = (tensor.to(wide).repeat_interleave(groups, 1) for tensor in (key, value))
        scores = _ScoreMod(call)(query.to(wide) @ key.transpose(-1, -2) * call.scale)
        weights = torch.softmax(scores, -1)
        lse, peak = scores.logsumexp(-1), scores.amax(-1)
        if _masks(call):
            seen = _live(call, scores).any(-1)
            weights = torch.where(seen.unsqueeze(-1), weights, 0.0)
            lse, peak = (torch.where(seen, rows, -math.inf) for rows in (lse, peak))
        return (weights @ value).to(query.dtype), lse, peak


def _indices(scores: Tensor) -> list[Tensor]:
    return [torch.arange(size) for size in scores.shape]  # GatherND takes int64 alone


def _function(mod: Any, captures: tuple[Tensor, ...]) -> Any:
    return lambda *lane: mod(*lane, *captures)


def _masks(call: Any) -> bool:
    return call.mods.mask is not None or call.inputs.schedule is not None


def _live(call: Any, scores: Tensor) -> Tensor:
    """Which pairs the call's mask and blocks let live."""
    live = torch.ones(1, 1, *scores.shape[2:], dtype=torch.bool)
    if call.mods.mask is not None:
        live = over_lanes(_function(call.mods.mask, call.inputs.mask_captures), ())(*_indices(scores))
    schedule = call.inputs.schedule
    if schedule is None:
        return live
    queries, keys = scores.shape[2:]
    batches, heads = schedule.grids
    band = schedule.bands(queries, keys, None, scores.device).band(
        slice(0, batches), slice(0, heads), slice(0, queries)
    )
    visited, full = band.lanes(slice(0, keys))
    return visited & (full | live)


def _constant(value: ir.Value) -> Tensor | None:
    return None if value.const_value is None else torch.from_numpy(value.const_value.numpy().copy())


def _examples(values: Any) -> list[tuple[Tensor, tuple[Any, ...]]]:
    """A tensor for each value, and which of its sizes change."""
    sizes: dict[str, int] = {}
    found = []
    for value in values:
        shape = [
            size if isinstance(size, int) else sizes.setdefault(str(size), 5 + 2 * len(sizes))
            for size in value.shape
        ]
        fixed, changing = torch.export.Dim.STATIC, torch.export.Dim.DYNAMIC
        changes = tuple(fixed if isinstance(size, int) else changing for size in value.shape)
        found.append((torch.ones(shape, dtype=ir.tensor_adapters.to_torch_dtype(value.dtype)), changes))
    return found


def _traced(
    module: nn.Module, examples: list[tuple[Tensor, tuple[Any, ...]]], prefix: str, opset_version: int
) -> ir.Graph:
    """What a module computes as a graph, its names after `prefix`."""
    tensors, changes = zip(*examples, strict=True)
    shapes = changes if len(changes) < 4 else (*changes[:3], changes[3:])  # the rest are captures
    exported = torch.export.export(module, tensors, dynamic_shapes=shapes, strict=False)
    graph = _to_onnx(exported, opset_version=opset_version).model.graph
    for initializer in [*graph.initializers.values()]:
        initializer.name = f"{prefix}/{initializer.name}"
    for value in [*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)]:
        value.name = f"{prefix}/{value.name}"
    graph.name = prefix
    return graph


def _inline(graph: ir.Graph, node: ir.Node, part: ir.Graph) -> None:
    """Put a part in the place of a node."""
    for given, value in zip(part.inputs, node.inputs, strict=True):
        convenience.replace_all_uses_with(given, value)
    for initializer in [*part.initializers.values()]:
        part.initializers.pop(initializer.name)
        graph.register_initializer(initializer)
    results, nodes = [*part.outputs], [*part]
    part.outputs.clear()
    part.remove(nodes)
    _put(graph, node, nodes, results)


def _put(graph: ir.Graph, node: ir.Node, nodes: list[ir.Node], results: list[ir.Value]) -> None:
    convenience.replace_nodes_and_values(graph, node, [node], nodes, [*node.outputs[: len(results)]], results)
