"""From a mask_mod and the call's sizes to the runs of tiles to visit."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch

from ..errors import warn_of_int32
from ..mod_ir import widths
from .errors import MaskModError, size_needed
from .refine import tile_runs
from .runs import Runs
from .tables import Extent
from .trace import INDEX_NAMES, MaskProgram, Ref, trace_mask
from .window import Seen, seen
from .window_schedule import bounds_of, runs_of


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
    program = known.program or trace_mask(mask_mod, device)
    if _may_leave_int32(program, extent):
        if device.type == "cpu":  # as attention does there
            program = trace_mask(widths.in_int64(mask_mod, INDEX_NAMES), device)
        else:
            warn_of_int32("mask_mod")
    if read := [name for name in unstated if name in program.reads]:
        raise size_needed(program.name, read)
    grids = (extent.batch if "b" in program.reads else 1, extent.heads if "h" in program.reads else 1)
    try:
        return tile_runs(program, extent), grids
    except (RuntimeError, IndexError, ValueError) as error:
        sizes = zip(INDEX_NAMES, (extent.batch, extent.heads, *extent.lengths), strict=True)
        where = ", ".join(f"{name} < {size}" for name, size in sizes)
        raise MaskModError(
            f"mask_mod {program.name}: fails at some {where}: {error}. "
            "A captured tensor needs an entry for every index it is read at."
        ) from error


def _may_leave_int32(program: MaskProgram, extent: Extent) -> bool:
    if any(isinstance(step.target, FunctionType) for step in program.steps):  # which could not be traced
        return True
    steps = [
        widths.Step(Ref(i), step.target, step.args, step.kwargs, step.dtype)
        for i, step in enumerate(program.steps)
        if isinstance(step.target, torch._ops.OpOverload)
    ]
    sizes = widths.Sizes(*map(widths.rounded, (extent.batch, extent.heads, *extent.lengths)))
    return widths.may_leave_int32(steps, [*map(Ref, range(len(INDEX_NAMES)))], sizes)
