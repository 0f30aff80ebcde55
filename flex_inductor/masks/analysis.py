"""From a mask_mod and the call's sizes to the runs of tiles to visit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import MaskModError, size_needed
from .refine import tile_runs
from .runs import FULL, PARTIAL, Runs, merged
from .tables import Extent
from .trace import INDEX_NAMES, trace_mask
from .window import Side, Window, seen, visited


def analysed(
    mask_mod: Callable, extent: Extent, device: torch.device, unstated: str
) -> tuple[Runs, tuple[int, int]]:
    """The runs of all rows of tiles, and the (batch, heads) for which they are kept.

    `unstated` names those of b and h for which no size was given: the mask must not read them.
    """
    window, _, program = seen(mask_mod, torch.empty(0, device=device))
    if window is not None and window.has_no_gaps:
        return _in_window(window, extent, device), (1, 1)
    program = program or trace_mask(mask_mod, device)
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


def _in_window(window: Window, extent: Extent, device: torch.device) -> Runs:
    """As tile_runs finds them, from the positions of tiles alone."""
    (queries, keys), (block, others), (rows, columns) = extent.lengths, extent.block, extent.tiles
    first = torch.arange(rows, device=device) * block
    tokens = (queries - first).clamp(max=block)
    ends = visited(window, Side(block, first, tokens, others, torch.full_like(first, keys)))
    found = []
    for kind, of_kind in zip((PARTIAL, FULL), ends, strict=True):
        for start, stop in zip(of_kind[::2], of_kind[1::2], strict=True):
            line = (start < stop).nonzero().squeeze(-1)
            found.append((line, start[line], stop[line], torch.full_like(line, kind, dtype=torch.int8)))
    return merged(rows, columns, *(torch.cat(parts) for parts in zip(*found, strict=True)))
