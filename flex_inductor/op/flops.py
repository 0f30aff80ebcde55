"""FLOPs for FlopCounterMode: the matrix products, two forward and five backward, over visited blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import _FlopCounterMode, flop_registry

from ..visits.places import COUNT, TileMap
from .call import AttentionCall, BackwardCall
from .hop import attention, attention_backward


def _forward_flops(*args: Any, out_val: Any = None) -> int:
    """Scores and output."""
    call = AttentionCall.read(*args)
    return 2 * _visited_lanes(call) * (call.query.size(-1) + call.value.size(-1))


def _backward_flops(*args: Any, out_val: Any = None) -> int:
    """Scores again, d query and d key along the head dim of queries; d value and d scores along that of values."""
    call = BackwardCall.read(*args)
    return 2 * _visited_lanes(call) * (3 * call.query.size(-1) + 2 * call.value.size(-1))


def _visited_lanes(call: AttentionCall | BackwardCall) -> int:
    batch, heads, queries, _ = call.query.shape
    lanes = batch * heads * queries * call.key.size(2)
    given, tile_map = call.inputs.schedule, call.inputs.tile_map
    tensors = [t for t in (*(given or ()), *(tile_map or ())) if isinstance(t, Tensor)]
    if given is None or not isinstance(lanes, int) or not all(map(_has_values, tensors)):
        return lanes
    # The query's device may not be there.
    schedule = given.bands(queries, call.key.size(2), tile_map, torch.device("cpu"))
    if tile_map is not None and call.inputs.ring is None:
        return _visited_in_map(schedule, tile_map, heads)
    visited = 0
    for start in range(0, queries, schedule.q_block):
        m = slice(start, min(start + schedule.q_block, queries))
        flags = schedule.band(slice(0, batch), slice(0, heads), m).visited.cpu()
        columns = _tokens_in_blocks(call.key.size(2), schedule.kv_block, flags.size(3))
        repeats = (batch // flags.size(0)) * (heads // flags.size(1))
        visited += int((flags * columns).sum()) * (m.stop - m.start) * repeats
    return visited


def _visited_in_map(schedule: Any, tile_map: TileMap, heads: int) -> int:
    """The map says how many tokens tiles have."""
    queries, keys = (lines[:, COUNT].long() for lines in tile_map)
    block, visited = schedule.q_block, 0
    for tile, tokens in enumerate(queries.tolist()):
        m = slice(tile * block, (tile + 1) * block)
        flags = schedule.band(slice(0, 1), slice(0, heads), m).visited
        visited += tokens * int((flags * keys).sum()) * (heads // flags.size(1))
    return visited


def _tokens_in_blocks(length: int, block: int, blocks: int) -> Tensor:
    """How many tokens each block holds: the last may be short."""
    return (length - torch.arange(blocks) * block).clamp(max=block)


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _count(op: Any, mode: _FlopCounterMode, *args: Any) -> Any:
    return mode.counter._count_flops(op, op(*args), args, {})


for _op, _flops in ((attention, _forward_flops), (attention_backward, _backward_flops)):
    flop_registry[_op] = _flops
    _op.py_impl(_FlopCounterMode)(lambda mode, *args, op=_op: _count(op, mode, *args))
