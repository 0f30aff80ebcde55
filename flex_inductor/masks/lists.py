"""Runs as torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .runs import FULL, PARTIAL, Extent, Runs, column_lists, merged, to_grid, transposed

SMALL_GRID = 1 << 12  # tiles
Listed = list[tuple[Tensor, Tensor]]  # counts and indices, for each kind of tile

LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def lists_from_runs(
    runs: Runs, grids: tuple[int, int], extent: Extent, separate_full_blocks: bool
) -> list[Tensor | None]:
    """Counts and indices: partial and full ones by rows, then by columns, in the order of BlockMask.

    Batch and heads are expanded, not copied. Without `separate_full_blocks` every tile is partial and the
    full lists are None.
    """
    if not separate_full_blocks:
        runs = without_full(runs)
    kinds = (PARTIAL, FULL) if separate_full_blocks else (PARTIAL,)
    small = runs.lines * runs.columns <= SMALL_GRID
    by_rows, by_columns = (_from_grid if small else _from_runs)(runs, grids, extent.tiles, kinds)
    lists: list[Tensor | None] = []
    for side in (by_rows, by_columns):
        for listed in side:
            lists += [_for_all(tensor, extent.batch, extent.heads) for tensor in listed]
        if not separate_full_blocks:
            lists += [None, None]
    return lists


def _for_all(listed: Tensor, batch: int, heads: int) -> Tensor:
    """Expanded only where it has to be: of a view, torch.compile makes a fake of its base too."""
    return listed if listed.shape[:2] == (batch, heads) else listed.expand(batch, heads, *listed.shape[2:])


def _from_runs(
    runs: Runs, grids: tuple[int, int], tiles: tuple[int, int], kinds: Sequence[int]
) -> list[Listed]:
    def listed(side: Runs, kind: int, lines: int, entries: int) -> tuple[Tensor, Tensor]:
        counts, indices = column_lists(side, kind)
        return counts.view(*grids, lines), indices.view(*grids, lines, entries)

    sides = ((runs, *tiles), (transposed(runs, grids[0] * grids[1]), *tiles[::-1]))
    return [[listed(side, kind, *sizes) for kind in kinds] for side, *sizes in sides]


def _from_grid(
    runs: Runs, grids: tuple[int, int], tiles: tuple[int, int], kinds: Sequence[int]
) -> list[Listed]:
    """The same where there are few tiles, for which it takes fewer operations."""
    grid = to_grid(runs).view(*grids, *tiles)
    return [[_listed(side == kind) for kind in kinds] for side in (grid, grid.mT)]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many are chosen in each line, and their places, then those of the others."""
    indices = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.to(torch.int32, memory_format=torch.contiguous_format)


def block_mask_from_runs(
    runs: Runs, grids: tuple[int, int], extent: Extent, mask_mod: Callable, separate_full_blocks: bool
) -> BlockMask:
    return block_mask_of(lists_from_runs(runs, grids, extent, separate_full_blocks), extent, mask_mod)


def block_mask_of(lists: Sequence[Tensor | None], extent: Extent, mask_mod: Callable) -> BlockMask:
    """The BlockMask of eight lists, or of four if there are no full blocks."""
    if len(lists) < len(LISTS):
        lists = [*lists[:2], None, None, *lists[2:], None, None]
    tensors: dict[str, Any] = dict(zip(LISTS, lists, strict=True))
    return BlockMask(seq_lengths=extent.lengths, **tensors, BLOCK_SIZE=extent.block, mask_mod=mask_mod)


def without_full(runs: Runs) -> Runs:
    """Every run partial: the kernel then applies mask_mod everywhere."""
    kind = torch.full_like(runs.kind, PARTIAL)
    return merged(runs.lines, runs.columns, runs.line, runs.start, runs.stop, kind)
