"""From a mask_mod and the call's sizes to the runs of tiles to visit."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch

from ...mod_ir import errors as mod_errors
from ...mod_ir import widths
from ..errors import fails_somewhere, size_needed
from ..runs import Extent, Runs
from ..window_schedule import bounds_of, runs_of
from .refine import tile_runs
from .trace import INDEX_NAMES, MaskGraph, trace_mask
from .window import Seen, seen


def analysed(
    mask_mod: Callable,
    extent: Extent,
    device: torch.device,
    unstated: str,
    known: Seen | None = None,
) -> tuple[Runs, tuple[int, int]]:
    """The runs of all rows of tiles, and the (batch, heads) for which they are kept.

    `unstated` names those of b and h for which no size was given: the mask must not read them.
    """
    known = known or seen(mask_mod, torch.empty(0, device=device))
    window = known.window_now(None if "b" in unstated else extent.batch, max(extent.lengths))
    if window is not None:
        bounds = bounds_of(window, extent.block, 0)
        return runs_of(bounds, extent.lengths, None, device), bounds.grids
    mask = known.mask or trace_mask(mask_mod, device)
    if _may_leave_int32(mask, extent):
        if device.type == "cpu":  # as attention does there
            mask = trace_mask(widths.in_int64(mask_mod, INDEX_NAMES), device)
        else:
            mod_errors.warn_of_int32("mask_mod")
    if read := [name for name in unstated if name in mask.reads]:
        raise size_needed(mask.name, read)
    grids = (extent.batch if "b" in mask.reads else 1, extent.heads if "h" in mask.reads else 1)
    try:
        return tile_runs(mask, extent), grids
    except (RuntimeError, IndexError, ValueError) as error:
        sizes = zip(INDEX_NAMES, (extent.batch, extent.heads, *extent.lengths), strict=True)
        raise fails_somewhere(mask.name, dict(sizes), error) from error


def _may_leave_int32(mask: MaskGraph, extent: Extent) -> bool:
    if any(isinstance(node.target, FunctionType) for node in mask.graph.nodes):  # which could not be traced
        return True
    sizes = widths.Sizes(*map(widths.rounded, (extent.batch, extent.heads, *extent.lengths)))
    return widths.may_leave_int32(mask.graph, mask.indices, sizes)
