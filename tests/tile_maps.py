"""Calls whose tiles lie where a map says, and the plain calls that they amount to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_inductor import create_block_mask
from flex_inductor.op import Inputs
from flex_inductor.visits import BlockRuns, Bounds, TileMap
from flex_inductor.visits.places import COUNT, INDEX, PIECE


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
    head: int = 0,
    gap: int = 0,
    scattered: bool = False,
) -> tuple[Inputs, list[Any]]:
    """The inputs of one call on all parts, one after the other with `gap` rows between them in one batch; and for each
    part what it visits alone, as a BlockMask. If keys are to be `scattered`, no tile is full."""
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
    grid = torch.block_diag(*flags).clamp(max=1 if scattered else 2).to(torch.int8)
    lines = (torch.tensor(table, dtype=torch.int32).view(-1, 6) for table in tables)
    return Inputs(schedule=schedule(grid, block), tile_map=TileMap(*lines), scattered=scattered), masks


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
    for side, (length, block) in enumerate(zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)):
        if length % block:  # a tile with fewer rows is not full
            found.select(side, -1).clamp_(max=1)
    return found


def schedule(grid: Tensor, block: tuple[int, int]) -> BlockRuns:
    """Of a grid of such flags."""
    tables = [side == kind for side in (grid, grid.T) for kind in (1, 2)]
    return BlockRuns.of(block, (tensor for table in tables for tensor in _runs(table)))


def _runs(table: Tensor) -> tuple[Tensor, Tensor]:
    edges = torch.nn.functional.pad(table.int(), (1, 1)).diff(dim=1)
    starts, stops = ((edges == sign).nonzero() for sign in (1, -1))
    counts = torch.bincount(starts[:, 0], minlength=table.size(0))
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return offsets[None, None], torch.stack([starts[:, 1], stops[:, 1]], 1).int()


def as_runs(schedule: Bounds | BlockRuns, tile_map: TileMap) -> BlockRuns:
    """The runs that bounds of sequences amount to."""
    if isinstance(schedule, BlockRuns):
        return schedule
    tables = []
    for side in ("keys", "queries"):
        for ends in schedule.all_ends(side, 0, 0, tile_map, tile_map.keys.device):
            runs = torch.cat(ends).T
            offsets = torch.arange(len(runs) + 1, dtype=torch.int32) * (len(ends) // 2)
            tables += [offsets[None, None], runs.reshape(-1, 2)]
    return BlockRuns.of(schedule[:2], tables)


def assert_runs_are_pieces(inputs: Inputs) -> None:
    """What a map promises about its schedule, line by line."""
    tile_map = inputs.tile_map
    schedule = as_runs(inputs.schedule, tile_map)
    sides = ((schedule.kv_offsets, schedule.kv_runs, False, 1), (schedule.full_kv_offsets, schedule.full_kv_runs, True, 1),
             (schedule.q_offsets, schedule.q_runs, False, 0), (schedule.full_q_offsets, schedule.full_q_runs, True, 0))  # fmt: skip
    for offsets, runs, full, side in sides:
        block, lines = schedule[side], tile_map[side].tolist()
        for line, (first, last) in enumerate(_pairs(offsets)):
            for start, stop in runs[first:last].tolist():
                counts = [count for *_, count in lines[start:stop]]
                assert all(count == block for count in counts[:-1]) and all(counts)
                for before, after in itertools.pairwise(lines[start:stop]):
                    assert after[INDEX] == before[INDEX] + block
                    assert (inputs.scattered and side) or after[:2] == [before[0], before[1] + block]
                if full:
                    assert counts in ([], [block] * len(counts))
                    held = tile_map[1 - side][line % len(tile_map[1 - side])]
                    assert start == stop or held[COUNT] == schedule[1 - side]
                    assert not (inputs.scattered and side) or sum(counts) % PIECE == 0


def _pairs(offsets: Tensor) -> Sequence[tuple[int, int]]:
    return [pair for grid in offsets.flatten(0, 1).tolist() for pair in itertools.pairwise(grid)]
