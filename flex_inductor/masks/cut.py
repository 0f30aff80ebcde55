"""Some rows and columns of tiles, in any order: their runs, and their mask_mod."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import MaskArgumentError
from .runs import Runs, counted, merged


def checked_tiles(
    name: str, chosen: Sequence[int] | Tensor | None, tiles: int, ragged: bool
) -> Tensor | None:
    """The chosen tiles as a tensor on the CPU; None for all. `ragged` says whether the last one is short."""
    if chosen is None:
        return None
    found = torch.as_tensor(chosen, device="cpu")
    whole = (
        found.dim() == 1 and not found.is_floating_point() and found.dtype != torch.bool and found.numel() > 0
    )
    if not whole or found.min() < 0 or found.max() >= tiles or found.unique().numel() < found.numel():
        raise MaskArgumentError(
            f"RunSchedule.cut: {name}: expected different integers from 0 to {tiles - 1}, got {chosen!r}. "
            "They are tiles, not tokens."
        )
    if ragged and (found[:-1] == tiles - 1).any():
        raise MaskArgumentError(
            f"RunSchedule.cut: {name}: tile {tiles - 1} is shorter than the others and must come last, got {chosen!r}."
        )
    return found.long()


def cut_runs(runs: Runs, grids: int, rows: Tensor, columns: Tensor) -> Runs:
    """The runs of these rows and columns of each of `grids` equal grids, numbered as they are given."""
    device = runs.line.device
    rows, columns = rows.to(device), columns.to(device)
    old_rows = runs.lines // grids
    new_row = torch.full((old_rows,), -1, device=device)
    new_row[rows] = torch.arange(rows.numel(), device=device)
    row = new_row[runs.line % old_rows]
    kept = (row >= 0).nonzero().squeeze(1)
    line = runs.line[kept] // old_rows * rows.numel() + row[kept]
    # Columns that were neighbours and still are, such as c, c + 1, ..., move together.
    ascending = torch.nn.functional.pad(columns.diff() == 1, (1, 0))
    first = (~ascending).nonzero().squeeze(1)
    lengths = torch.nn.functional.pad(first, (0, 1), value=columns.numel()).diff()
    order = columns[first].argsort()
    old_start, new_start, lengths = columns[first][order], first[order], lengths[order]
    start, stop, kind = runs.start[kept], runs.stop[kept], runs.kind[kept]
    lowest = torch.searchsorted(old_start + lengths, start, right=True)
    beyond = torch.searchsorted(old_start, stop)
    run, within = counted((beyond - lowest).clamp(min=0))
    segment = lowest[run] + within
    moved = new_start[segment] - old_start[segment]
    begin = torch.maximum(start[run], old_start[segment]) + moved
    end = torch.minimum(stop[run], old_start[segment] + lengths[segment]) + moved
    return merged(grids * rows.numel(), columns.numel(), line[run], begin, end, kind[run])


def cut_mask(mask_mod: Callable, block: tuple[int, int], rows: Tensor, columns: Tensor) -> Callable:
    """`mask_mod` on indices that count the tokens of the chosen tiles."""

    def cut(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q = rows[q_idx // block[0]] * block[0] + q_idx % block[0]
        kv = columns[kv_idx // block[1]] * block[1] + kv_idx % block[1]
        return mask_mod(b, h, q, kv)

    return cut
