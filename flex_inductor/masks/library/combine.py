"""Block masks from block masks of one size, tile by tile, without evaluating any mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..errors import MaskArgumentError
from ..lists import block_mask_from_runs
from ..ordinary import ordinary_tensors
from ..runs import Extent, Runs, merged, overlay, repeated
from ..schedule import RunSchedule, extent_of, runs_of_block_mask
from .algebra import and_masks, or_masks

Blocks = TypeVar("Blocks", BlockMask, RunSchedule)


def intersect(first: Blocks, second: BlockMask | RunSchedule) -> Blocks:
    """Visit what both block masks visit, full where both are full.

    No mask is evaluated. A tile that is partial in both stays listed even where no point is true in both; the result's
    mask_mod, the `and_masks` of the two, masks it out.

    Args:
        first: a BlockMask or a RunSchedule.
        second: another one of the same B, H, lengths and block size.

    Returns:
        BlockMask or RunSchedule: of the type of `first`.

    Raises:
        MaskArgumentError: the two differ in size or device, or one is a mask_mod.

    Example:
        >>> sizes = (None, None, 1024, 1024)
        >>> window = create_block_mask(masks.sliding_window(256), *sizes, compact=True)
        >>> packed = create_block_mask(masks.document(lengths=[512, 512]), *sizes, compact=True)
        >>> window.sparsity(), masks.intersect(window, packed).sparsity()
        (67.1875, 71.875)
    """
    return _combine("intersect", first, second, torch.minimum, and_masks)


def unite(first: Blocks, second: BlockMask | RunSchedule) -> Blocks:
    """Visit what either of two block masks visits, full where either is full.

    Args:
        first: a BlockMask or a RunSchedule.
        second: another one of the same B, H, lengths and block size.

    Returns:
        BlockMask or RunSchedule: of the type of `first`.

    Raises:
        MaskArgumentError: the two differ in size or device, or one is a mask_mod.

    Example:
        >>> sizes = (None, None, 1024, 1024)
        >>> window = create_block_mask(masks.sliding_window(128), *sizes, compact=True)
        >>> def first(b, h, q_idx, kv_idx):
        ...     return kv_idx < 256
        >>> prefix = create_block_mask(first, *sizes, compact=True)
        >>> window.sparsity(), masks.unite(window, prefix).sparsity()
        (76.5625, 57.8125)
    """
    return _combine("unite", first, second, torch.maximum, or_masks)


@ordinary_tensors
def _combine(name: str, first: Any, second: Any, kinds: Callable, mods: Callable) -> Any:
    parts = [_parts(name, position, mask) for position, mask in (("first", first), ("second", second))]
    (a, a_grids, extent), (b, b_grids, other) = parts
    for what in ("batch", "heads", "lengths", "block"):
        left, right = getattr(extent, what), getattr(other, what)
        if left != right:
            raise MaskArgumentError(
                f"{name}: expected two block masks of one size, got {what} {left} and {right}. "
                "Build both with the same B, H, Q_LEN, KV_LEN and BLOCK_SIZE."
            )
    if a.line.device != b.line.device:
        raise MaskArgumentError(
            f"{name}: expected two block masks on one device, got {a.line.device} and {b.line.device}. "
            "Move one with .to(device)."
        )
    grids = (max(a_grids[0], b_grids[0]), max(a_grids[1], b_grids[1]))
    rows, columns = extent.tiles
    a, b = (_broadcast(runs, own, grids, rows) for runs, own in ((a, a_grids), (b, b_grids)))
    line, start, stop, in_a, in_b = overlay(a, b)
    kind = kinds(in_a, in_b)
    keep = kind > 0
    runs = merged(a.lines, columns, line[keep], start[keep], stop[keep], kind[keep])
    mask_mod = mods(first.mask_mod, second.mask_mod)
    if isinstance(first, RunSchedule):
        return RunSchedule.from_runs(runs, grids, extent, mask_mod, first.separate_full_blocks)
    separate = first.full_kv_num_blocks is not None
    return block_mask_from_runs(runs, grids, extent, mask_mod, separate)


def _parts(name: str, position: str, mask: Any) -> tuple[Runs, tuple[int, int], Extent]:
    if isinstance(mask, RunSchedule):
        return mask.row_runs(), mask.grids, mask.extent
    if isinstance(mask, BlockMask):
        return *runs_of_block_mask(mask), extent_of(mask)
    raise MaskArgumentError(
        f"{name}: {position}: expected a BlockMask or a RunSchedule, got {type(mask).__name__}. "
        "To combine mask functions use and_masks or or_masks."
    )


def _broadcast(runs: Runs, own: tuple[int, int], wanted: tuple[int, int], rows: int) -> Runs:
    if own == wanted:
        return runs
    number: Tensor = torch.arange(own[0] * own[1], device=runs.line.device).view(own).expand(wanted)
    return repeated(runs, number.reshape(-1), rows)
