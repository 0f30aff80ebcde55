"""What a call's options tell the autotuner: the share of blocks visited, and which results were imported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import upward
from .op import AttentionCall, attention
from .op.schedule import BlockRuns, Bounds, RowBounds, SequenceBounds, by_rows
from .options import tuning_options
from .windows import ON_NUMBERS

_LEAST_SHARE = 2.0**-12


def tell_tuner(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Complete the options of each call in a Dynamo graph."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=True))
    imported = upward.imported_tuning()
    for node in module.graph.find_nodes(op="call_function", target=attention):
        call = AttentionCall.read(*node.args)
        shares = _visited(call, values)
        node.args = call._replace(options=tuning_options(call.options, imported, shares)).wire()
    module.recompile()


def _visited(call: AttentionCall, values: Mapping[Any, Any]) -> tuple[float, float] | None:
    """The shares of partial and of full blocks, rounded to powers of the square root of two."""
    schedule = call.inputs.schedule
    if schedule is None:
        return None
    given: Any = type(schedule)(*(values.get(field, field) for field in schedule))
    read = given if isinstance(given, Bounds) else by_rows(given)
    if not all(map(_is_here, (given.kv_block, *read))):
        return None
    if isinstance(given, RowBounds):
        rows, columns, counts = _in_bounds(given.of_batch(0), _size(call.query, 2), _size(call.key, 2))
    elif isinstance(given, SequenceBounds):
        tile_map: Any = call.inputs.tile_map
        lines = values.get(tile_map.queries, tile_map.queries)
        if not _is_here(lines):
            return None
        rows, columns = lines.size(0), _size(tile_map.keys, 0)
        counts = [_between(ends).sum().item() for ends in given.rows(lines)]
    elif isinstance(given, BlockRuns):
        columns = given.q_offsets.size(-1) - 1
        rows = given.kv_offsets[..., 1:].numel()
        counts = [(runs[:, 1] - runs[:, 0]).sum().item() for runs in (given.kv_runs, given.full_kv_runs)]
    else:
        columns = given.kv_indices.size(-1)
        rows = given.kv_num_blocks.numel()
        both = (given.kv_num_blocks, given.full_kv_num_blocks)
        counts = [0 if blocks is None else blocks.sum().item() for blocks in both]
    partial, full = (_coarse(count / max(rows * columns, 1)) for count in counts)
    return partial, full


def _in_bounds(bounds: RowBounds, queries: int, keys: int) -> tuple[int, int, Sequence[float]]:
    """How many rows and columns of blocks there are, and how many blocks of either kind."""
    rows, columns = -(-queries // bounds.q_block), -(-keys // bounds.kv_block)
    found = [bounds.row(row, queries, keys, ON_NUMBERS) for row in range(rows)]
    counts = [sum(map(_between, kind)) for kind in zip(*found, strict=True)]
    return rows, columns, counts or [0, 0]


def _between(ends: Sequence[Any]) -> Any:
    """How many blocks are in runs that begin and end there."""
    return sum(ends[1::2]) - sum(ends[::2])


def _size(tensor: Any, dim: int) -> int:
    size = tensor.meta["example_value"].size(dim)
    return size if isinstance(size, int) else size.node.hint


def _is_here(value: Any) -> bool:
    return not isinstance(value, fx.Node | torch._subclasses.FakeTensor)


def _coarse(share: float) -> float:
    return 0.0 if share == 0 else round(2 ** (round(2 * math.log2(max(share, _LEAST_SHARE))) / 2), 6)
