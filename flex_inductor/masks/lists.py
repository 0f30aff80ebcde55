"""Runs as torch's BlockMask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .runs import FULL, PARTIAL, Runs, column_lists, merged, transposed
from .tables import Extent


def block_mask_from_runs(
    runs: Runs, grids: tuple[int, int], extent: Extent, mask_mod: Callable, separate_full_blocks: bool
) -> BlockMask:
    """torch's four pairs of lists; batch and heads are expanded, not copied."""
    if not separate_full_blocks:
        runs = without_full(runs)
    columns = transposed(runs, grids[0] * grids[1])
    rows, cols = extent.tiles

    def lists(side: Runs, kind: int, lines: int, entries: int) -> tuple[Tensor, Tensor]:
        counts, indices = column_lists(side, kind)
        leading = (extent.batch, extent.heads)
        return (
            counts.view(*grids, lines).expand(*leading, -1),
            indices.view(*grids, lines, entries).expand(*leading, -1, -1),
        )

    kv, q = lists(runs, PARTIAL, rows, cols), lists(columns, PARTIAL, cols, rows)
    full_kv: tuple[Tensor | None, Tensor | None] = (None, None)
    full_q: tuple[Tensor | None, Tensor | None] = (None, None)
    if separate_full_blocks:
        full_kv, full_q = lists(runs, FULL, rows, cols), lists(columns, FULL, cols, rows)
    return BlockMask(
        seq_lengths=extent.lengths,
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=q[0],
        q_indices=q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=extent.block,
        mask_mod=mask_mod,
    )


def without_full(runs: Runs) -> Runs:
    """Every run partial: the kernel then applies mask_mod everywhere."""
    kind = torch.full_like(runs.kind, PARTIAL)
    return merged(runs.lines, runs.columns, runs.line, runs.start, runs.stop, kind)
