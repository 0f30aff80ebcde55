"""Runs as torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .runs import FULL, PARTIAL, Runs, column_lists, merged, transposed
from .tables import Extent

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
    columns = transposed(runs, grids[0] * grids[1])
    lists: list[Tensor | None] = []
    for side, (lines, entries) in ((runs, extent.tiles), (columns, extent.tiles[::-1])):
        for kind in (PARTIAL, FULL):
            if kind == FULL and not separate_full_blocks:
                lists += [None, None]
                continue
            counts, indices = column_lists(side, kind)
            lists.append(counts.view(*grids, lines).expand(extent.batch, extent.heads, -1))
            lists.append(indices.view(*grids, lines, entries).expand(extent.batch, extent.heads, -1, -1))
    return lists


def block_mask_from_runs(
    runs: Runs, grids: tuple[int, int], extent: Extent, mask_mod: Callable, separate_full_blocks: bool
) -> BlockMask:
    return block_mask_of(lists_from_runs(runs, grids, extent, separate_full_blocks), extent, mask_mod)


def block_mask_of(lists: Sequence[Tensor | None], extent: Extent, mask_mod: Callable) -> BlockMask:
    """A BlockMask of its eight lists, or of the four there are without full blocks."""
    if len(lists) < len(LISTS):
        lists = [*lists[:2], None, None, *lists[2:], None, None]
    tensors: dict[str, Any] = dict(zip(LISTS, lists, strict=True))
    return BlockMask(seq_lengths=extent.lengths, **tensors, BLOCK_SIZE=extent.block, mask_mod=mask_mod)


def without_full(runs: Runs) -> Runs:
    """Every run partial: the kernel then applies mask_mod everywhere."""
    kind = torch.full_like(runs.kind, PARTIAL)
    return merged(runs.lines, runs.columns, runs.line, runs.start, runs.stop, kind)
