"""Calls whose tiles lie where a map says, and the plain calls that they amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_inductor import create_block_mask
from flex_inductor.op import Inputs
from flex_inductor.op.schedule import BlockLists, BlockRuns
from flex_inductor.op.tile_map import TileMap


class Part(NamedTuple):
    """A sequence of its own, or a shard of one: where mods see it begin, and how long it is."""

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0


def packed(
    mask_mod: Callable | None,
    parts: Sequence[Part],
    block: tuple[int, int],
    form: str,
    head: int = 0,
    gap: int = 0,
) -> tuple[Inputs, list[Any]]:
    """The inputs of one call on all parts, one after the other with `gap` rows between them in one batch; and for each
    part what it visits alone, as a BlockMask."""
    masks, tables, flags = [], ([], []), []
    rows = [0, 0]
    for sequence, part in enumerate(parts):
        mask = create_block_mask(
            _seen(mask_mod, part, sequence, head), 1, 1, part.queries, part.keys, "cpu", block
        )
        masks.append(mask)
        for side, (length, first, step) in enumerate(
            ((part.queries, part.first_query, block[0]), (part.keys, part.first_key, block[1]))
        ):
            for start in range(0, length, step):
                count = min(step, length - start)
                tables[side].append([0, rows[side] + start, sequence, head, first + start, count])
            rows[side] += length + gap
        flags.append(_flags(mask))
    grid = torch.block_diag(*flags).to(torch.int8)
    tile_map = TileMap(*(torch.tensor(table, dtype=torch.int32).view(-1, 6) for table in tables))
    return Inputs(schedule=schedule(grid, block, form), tile_map=tile_map), masks


def _seen(mask_mod: Callable | None, part: Part, sequence: int, head: int) -> Callable:
    if mask_mod is None:
        return lambda b, h, q, kv: q >= 0
    return lambda b, h, q, kv: mask_mod(b + sequence, h + head, q + part.first_query, kv + part.first_key)


def _flags(mask: Any) -> Tensor:
    """0 for a block that is not visited, 1 for a partial and 2 for a full one."""
    found = torch.zeros(mask.kv_indices.shape[-2:])
    for kind, counts, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(found.size(0)):
            found[row, indices[0, 0, row, : counts[0, 0, row]].long()] = kind
    return found


def schedule(grid: Tensor, block: tuple[int, int], form: str) -> BlockLists | BlockRuns:
    """Of a grid of such flags."""
    tables = [side == kind for side in (grid, grid.T) for kind in (1, 2)]
    make = _lists if form == "lists" else _runs
    fields = [tensor for table in tables for tensor in make(table)]
    return (BlockLists if form == "lists" else BlockRuns)(*block, *fields)


def _lists(table: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(table.int(), dim=1, descending=True, stable=True)
    return table.sum(1).int()[None, None], order.int()[None, None]


def _runs(table: Tensor) -> tuple[Tensor, Tensor]:
    edges = torch.nn.functional.pad(table.int(), (1, 1)).diff(dim=1)
    starts, stops = ((edges == sign).nonzero() for sign in (1, -1))
    counts = torch.bincount(starts[:, 0], minlength=table.size(0))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return offsets[None, None], torch.stack([starts[:, 1], stops[:, 1]], 1).int()
