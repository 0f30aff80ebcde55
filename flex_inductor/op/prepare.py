"""Prepares a call for the ops: mods become checked graphs, numbers become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import errors
from ..mod_ir import errors as mod_errors
from ..mod_ir.arguments import MASK_LANES, SCORE_LANES, number_dtype, score_dtype
from ..mod_ir.capture import LiftedMod, lift
from ..mod_ir.checks import lane_graph
from ..mod_ir.indexing import sizes_at_positions
from ..mod_ir.names import WrappedMod, capture_names
from ..mod_ir.widths import Sizes, graph_may_leave_int32, in_int64, rounded
from ..visits import Bounds, Schedule
from ..visits.places import COLUMNS, TileMap
from .call import AttentionCall


def lift_captures(call: AttentionCall) -> AttentionCall:
    """Mods of calls from plain Python still hold their captures."""
    for field, lanes in (("score", SCORE_LANES), ("mask", MASK_LANES)):
        mod, captures = getattr(call, f"{field}_mod"), getattr(call.inputs, f"{field}_captures")
        if mod is None or captures or isinstance(mod, (fx.GraphModule, LiftedMod, WrappedMod)):
            continue
        lifted: dict[str, Any] = {}
        lifted[f"{field}_mod"], captures = lift(mod, lanes, call.query)
        call = call._replace(**lifted).with_inputs(**{f"{field}_captures": captures})
    return call


def prepare(call: AttentionCall) -> AttentionCall:
    """Numbers become tensors, a scale that no kernel can hold as a literal a capture; captures are checked."""
    inputs = call.inputs
    call = call.with_inputs(
        score_captures=tuple(_number_to_tensor(c, call.query) for c in inputs.score_captures),
        mask_captures=tuple(_number_to_tensor(c, call.query) for c in inputs.mask_captures),
    )
    schedule: Any = inputs.schedule
    if isinstance(schedule, Bounds):
        bounds = schedule.with_numbers(lambda n: _bound_to_tensor(n, call.query))
        call = call.with_inputs(schedule=bounds)
    if inputs.tile_map is not None and inputs.ring is None:
        _check_tile_map(inputs.tile_map, inputs.schedule)
    if not _is_literal(call.scale, score_dtype(call.query.dtype)):
        call = _scale_as_capture(call)
    inputs = call.inputs
    tensors = (call.query, call.key, call.value, *inputs.differentiable)
    saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    for field in ("score", "mask"):
        mod, captures = getattr(call, f"{field}_mod"), getattr(inputs, f"{field}_captures")
        for i, capture in enumerate(captures):
            if capture.device != call.query.device:
                name = capture_names(mod, len(captures))[i]
                raise mod_errors.capture_on_other_device(
                    f"{field}_mod", name, capture.device, call.query.device
                )
            if saves and capture.is_inference():
                raise mod_errors.capture_of_inference_mode(
                    f"{field}_mod", capture_names(mod, len(captures))[i]
                )
            if field == "mask" and capture.requires_grad:
                raise mod_errors.mask_capture_needs_grad(capture_names(mod, len(captures))[i])
    if call.mask_mod is not None:
        call = call._replace(mask_mod=_wide_enough(call, call.mask_mod, "mask_mod", inputs.mask_captures))
    if inputs.sharded is not None:
        _check_whole(call, *inputs.sharded)
        call = call.with_inputs(sharded=None)
    return call


def _check_whole(call: AttentionCall, tokens: Any, whole: Any) -> None:
    """If this process has a part of a sequence, captures are of the whole: mods see all of it."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

    captures = call.inputs.score_captures
    if call.score_mod is None or tokens == whole:
        return
    graph: Any = with_score_graph(call).score_mod
    for capture, size in sizes_at_positions(graph, len(captures)):
        if statically_known_true(size == tokens):
            name = capture_names(call.score_mod, len(captures))[capture]
            raise mod_errors.capture_of_a_part(name, tokens, whole)


def _check_tile_map(tile_map: TileMap, schedule: Schedule | None) -> None:
    if schedule is None:
        raise errors.tile_map_without_schedule()
    expected = schedule.for_map(tile_map)
    if expected is None:
        raise errors.tile_map_without_runs(schedule.form)
    for name, tensor, tiles in zip(TileMap._fields, tile_map, expected, strict=True):
        if (
            tensor.dtype != torch.int32
            or tensor.dim() != 2
            or tensor.size(1) != COLUMNS
            or tensor.size(0) != tiles
        ):
            raise errors.bad_tile_map(name, tensor, (tiles, COLUMNS))


def with_score_graph(call: AttentionCall) -> AttentionCall:
    """`call` with its score_mod as a checked graph."""
    if call.score_mod is None:
        return call
    graph = _wide_enough(call, call.score_mod, "score_mod", call.inputs.score_captures)
    return call._replace(score_mod=graph)


def as_its_graph(score_mod: Any, graph: fx.GraphModule, captures: Sequence[Any]) -> Any:
    """`score_mod`, in int64 where its graph is."""
    return _widened(score_mod, SCORE_LANES, captures) if graph.meta.get(_WIDENED) else score_mod


def _wide_enough(call: AttentionCall, mod: Any, field: str, captures: Sequence[Any]) -> fx.GraphModule:
    """The graph of a mod: in int64 where its integers may leave int32."""
    lanes = SCORE_LANES if field == "score_mod" else MASK_LANES
    graph = lane_graph(mod, field, call.query, captures)
    if not graph_may_leave_int32(graph, lanes, sizes_of(call)):
        return graph
    if call.query.device.type != "cpu":
        mod_errors.warn_of_int32(field)
        return graph
    graph = lane_graph(_widened(mod, lanes, captures), field, call.query, captures)
    graph.meta[_WIDENED] = True
    return graph


def _widened(mod: Any, lanes: Sequence[str], captures: Sequence[Any]) -> WrappedMod:
    return WrappedMod(in_int64(mod, lanes), capture_names(mod, len(captures)))


_WIDENED = "flex_inductor_widened"


def sizes_of(call: AttentionCall) -> Sizes:
    """How many indices of each kind mods may see."""
    inputs, query, key = call.inputs, call.query, call.key
    batches, heads, queries, keys = *query.shape[:3], key.size(2)
    if inputs.sharded is not None:
        queries = keys = inputs.sharded[1]
    if inputs.tile_map is not None:  # a sequence is no longer than all that is stored
        batches, heads = inputs.tile_map.queries.size(0), heads + _HEADS_OF_MAPS
        keys = key.size(0) * keys
        queries = torch.sym_max(queries, keys)
    return Sizes(
        rounded(batches), rounded(heads), *(rounded(torch.sym_max(n, SHORT)) for n in (queries, keys))
    )


SHORT = 1 << 10  # lengths up to this are decided alike
_HEADS_OF_MAPS = 1 << 12  # a map may begin at a later head


def _number_to_tensor(capture: Any, query: Tensor) -> Any:
    """A Python number that Dynamo lifted, because it changes from call to call, becomes a 0-d tensor."""
    dtype = number_dtype(capture, query)
    if dtype is None:
        return capture
    number: Any = capture
    return torch.scalar_tensor(number, dtype=dtype, device=query.device)


def _bound_to_tensor(bound: Any, query: Tensor) -> Any:
    """The same for a number of a schedule."""
    if not isinstance(bound, torch.SymInt):
        return bound
    number: Any = bound
    return torch.full((1,), number, dtype=torch.int32, device=query.device)


def _is_literal(scale: Any, dtype: torch.dtype) -> bool:
    """Whether `scale` is the same in each call, and finite."""
    changes = isinstance(scale, (torch.SymInt, torch.SymFloat, Tensor))
    return not changes and abs(scale) <= torch.finfo(dtype).max


def _scale_as_capture(call: AttentionCall) -> AttentionCall:
    inner = call.score_mod
    scale: Any = call.scale
    if not isinstance(scale, Tensor):
        scale = torch.ones((), dtype=score_dtype(call.query.dtype), device=call.query.device) * scale

    def scaled(score, b, h, q_idx, kv_idx, scale, *captures):
        score = score * scale
        return score if inner is None else inner(score, b, h, q_idx, kv_idx, *captures)

    captures = call.inputs.score_captures
    names = ("scale", *capture_names(inner, len(captures)))
    call = call._replace(score_mod=WrappedMod(scaled, names), scale=1.0)
    return call.with_inputs(score_captures=(scale, *captures))
