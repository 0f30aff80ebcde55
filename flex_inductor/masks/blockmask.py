"""create_block_mask: torch's function, without the grid of all (q, kv) pairs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from .errors import MaskArgumentError
from .refine import tile_runs
from .runs import FULL, PARTIAL, Runs, column_lists, merged, transposed
from .tables import Extent
from .trace import check_signature, trace_mask

HAS_WRITE_ORDER = hasattr(torch_flex, "_compute_dq_write_order_from_block_mask")


def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> Any:
    """The tiles of `mask_mod` that attention has to visit, as torch's BlockMask.

    Equal to `torch.nn.attention.flex_attention.create_block_mask` with the same arguments, except that
    the tensors have stride 0 along batch and heads where the mask does not depend on them.
    """
    extent, device = check_arguments(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    if _compile:
        warnings.warn(
            "create_block_mask: _compile=True has no effect here: nothing quadratic is left to compile.",
            DeprecationWarning,
            stacklevel=2,
        )
    _check_write_order(separate_full_blocks, compute_dq_write_order, dq_kv_order)
    program = trace_mask(mask_mod, device)
    with torch.no_grad():
        runs = tile_runs(program, extent)
        grids = (extent.batch if "b" in program.reads else 1, extent.heads if "h" in program.reads else 1)
        block_mask = block_mask_from_runs(runs, grids, extent, mask_mod, separate_full_blocks)
    if compute_dq_write_order:
        orders = torch_flex._compute_dq_write_order_from_block_mask(block_mask, dq_kv_order=dq_kv_order)
        block_mask.dq_write_order, block_mask.dq_write_order_full = orders
        block_mask.dq_kv_order_spt = dq_kv_order
    return block_mask


def check_arguments(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any, BLOCK_SIZE: Any
) -> tuple[Extent, torch.device]:
    check_signature(mask_mod)
    sizes = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, value in sizes.items():
        least = 1 if name in ("B", "H") else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MaskArgumentError(
                f"{name}: expected an integer of at least {least}, got {value!r}."
                + (" Pass None for a mask that is the same for all of them." if least else "")
            )
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    if (
        not isinstance(block, (tuple, list))
        or len(block) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in block)
    ):
        raise MaskArgumentError(
            f"BLOCK_SIZE: expected an integer of at least 1, or two of them for (q, kv), got {BLOCK_SIZE!r}."
        )
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    resolved = torch.empty(0, device=device).device
    batch, heads, q_length, kv_length = sizes.values()
    return Extent(batch, heads, (q_length, kv_length), (block[0], block[1])), resolved


def _check_write_order(separate_full_blocks: bool, compute_dq_write_order: bool, dq_kv_order: Any) -> None:
    if not isinstance(dq_kv_order, bool):
        raise MaskArgumentError(
            f"dq_kv_order: expected True or False, got {type(dq_kv_order).__name__}. "
            "A tensor order goes to BlockMask.from_kv_blocks."
        )
    if compute_dq_write_order and not HAS_WRITE_ORDER:
        raise MaskArgumentError(
            f"compute_dq_write_order: torch {torch.__version__} has no write order in its BlockMask. "
            "Leave it False, or use torch 2.13 or later."
        )


def block_mask_from_runs(
    runs: Runs, grids: tuple[int, int], extent: Extent, mask_mod: Callable, separate_full_blocks: bool
) -> BlockMask:
    """torch's four pairs of lists; batch and heads are expanded, not copied."""
    if not separate_full_blocks:
        runs = _without_full(runs)
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


def _without_full(runs: Runs) -> Runs:
    """Every run partial: the kernel then applies mask_mod everywhere."""
    kind = torch.full_like(runs.kind, PARTIAL)
    return merged(runs.lines, runs.columns, runs.line, runs.start, runs.stop, kind)
