"""Runs of equal tiles along lines of a grid of tiles.

A line is one row of tiles of one (b, h). `Runs` lists, for each line, maximal ranges [start, stop) of
columns that are all partial or all full; what is not listed is empty. Everything here is vectorised over
the runs, and costs memory by the number of runs, not by the number of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2
LEAST = 2  # entries of a table: torch specializes sizes 0 and 1


@dataclass(frozen=True)
class Extent:
    """The index space of a mask, in tokens and in tiles."""

    batch: int
    heads: int
    lengths: tuple[int, int]
    block: tuple[int, int]

    @property
    def tiles(self) -> tuple[int, int]:
        return (-(-self.lengths[0] // self.block[0]), -(-self.lengths[1] // self.block[1]))


@dataclass(frozen=True)
class Runs:
    """Sorted by (line, start); neighbours of one kind are one run. `kind` is PARTIAL or FULL."""

    lines: int
    columns: int
    line: Tensor
    start: Tensor
    stop: Tensor
    kind: Tensor

    def of_kind(self, kind: int) -> Runs:
        keep = self.kind == kind
        return Runs(
            self.lines, self.columns, self.line[keep], self.start[keep], self.stop[keep], self.kind[keep]
        )

    def offsets(self) -> Tensor:
        """Where each line's runs begin, and one more entry for the end; int32."""
        counts = torch.bincount(self.line, minlength=self.lines)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def tiles(self) -> Tensor:
        """Tiles in each line; int32."""
        counts = torch.zeros(self.lines, dtype=torch.int64, device=self.line.device)
        return counts.index_add_(0, self.line, self.stop - self.start).to(torch.int32)


def tables(runs: Runs, grids: tuple[int, int]) -> list[Tensor]:
    """Offsets [*grids, lines + 1] and runs [count, 2] of partial tiles, then of full ones; int32.

    Where there are fewer than LEAST runs, zeros follow.
    """
    lines, device = runs.lines // (grids[0] * grids[1]), runs.line.device
    # Each grid has its own end.
    at = torch.arange(grids[0] * grids[1], device=device)[:, None] * lines
    at = (at + torch.arange(lines + 1, device=device)).view(*grids, lines + 1)
    found = []
    for kind in (PARTIAL, FULL):
        of = runs.of_kind(kind)
        room = max(0, LEAST - of.line.numel())
        pairs = torch.stack([of.start, of.stop], 1).to(torch.int32)
        found += [of.offsets()[at], torch.nn.functional.pad(pairs, (0, 0, 0, room))]
    return found


def merged(lines: int, columns: int, line: Tensor, start: Tensor, stop: Tensor, kind: Tensor) -> Runs:
    """Runs from disjoint segments in any order."""
    order = torch.argsort(line * columns + start)
    line, start, stop, kind = line[order], start[order], stop[order], kind[order]
    first = (start != preceding(stop, -1)) | (line != preceding(line, -1)) | (kind != preceding(kind, -1))
    last = torch.roll(first, -1)
    return Runs(lines, columns, line[first], start[first], stop[last], kind[first])


def split(runs: Runs, before: Tensor) -> Runs:
    """The same ranges, cut before the columns that `before` flags."""
    passed = before.cumsum(0)
    first = passed[runs.start]
    pieces = 1 + passed[runs.stop - 1] - first
    run, within = counted(pieces)
    places = torch.nn.functional.pad(before.nonzero().squeeze(1), (0, 1))
    cut = first[run] + within  # the entry of `places` before which this piece ends
    start = torch.where(within == 0, runs.start[run], places[cut - 1])
    stop = torch.where(within + 1 == pieces[run], runs.stop[run], places[cut])
    return Runs(runs.lines, runs.columns, runs.line[run], start, stop, runs.kind[run])


def following(x: Tensor, last: int) -> Tensor:
    """Each entry's successor."""
    return torch.nn.functional.pad(x, (0, 1), value=last)[1:]


def preceding(x: Tensor, first: int) -> Tensor:
    """Each entry's predecessor."""
    return torch.nn.functional.pad(x, (1, 0), value=first)[:-1]


def counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of sum(counts) items: which entry it belongs to, and its place within that entry."""
    entry = torch.repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    return entry, torch.arange(entry.numel(), device=counts.device) - before[entry]


def covering(runs: Runs) -> Runs:
    """The lines without gaps: where nothing is listed there are EMPTY ranges."""
    every = torch.arange(runs.lines, device=runs.line.device)
    gap_start = torch.where(runs.line == preceding(runs.line, -1), preceding(runs.stop, 0), 0)
    ends = torch.zeros(runs.lines, dtype=torch.int64, device=runs.line.device)
    ends.scatter_reduce_(0, runs.line, runs.stop, "amax")
    line = torch.cat([runs.line, runs.line, every])
    start = torch.cat([runs.start, gap_start, ends])
    stop = torch.cat([runs.stop, runs.start, torch.full_like(ends, runs.columns)])
    kind = torch.cat(
        [runs.kind, torch.full_like(runs.kind, EMPTY), torch.full_like(every, EMPTY, dtype=runs.kind.dtype)]
    )
    keep = start < stop
    return merged(runs.lines, runs.columns, line[keep], start[keep], stop[keep], kind[keep])


def overlay(a: Runs, b: Runs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ranges in which neither changes, covering every line: (line, start, stop, kind in a, kind in b)."""
    a, b = covering(a), covering(b)
    keys = [r.line * r.columns + r.start for r in (a, b)]
    cuts = torch.unique(torch.cat(keys))
    kinds = [
        r.kind[torch.searchsorted(key, cuts, right=True) - 1] for r, key in zip((a, b), keys, strict=True)
    ]
    line, start = cuts // a.columns, cuts % a.columns
    stop = start + (following(cuts, a.lines * a.columns) - cuts)
    return line, start, stop, kinds[0], kinds[1]


def transposed(runs: Runs, grids: int) -> Runs:
    """Runs along the columns of each of `grids` equal grids that `runs` holds one after the other.

    A column's run begins or ends where two neighbouring rows differ, so the rows are compared with the
    ones above them, and only the columns that change are spelled out.
    """
    rows = runs.lines // grids
    if runs.lines == 0:
        return Runs(grids * runs.columns, rows, runs.line, runs.start, runs.stop, runs.kind)
    # Line r of `above` is row r - 1; the first row of each grid, and one line after the last, are empty.
    stretched = rows + 1
    place = runs.line + runs.line // rows
    below = Runs(grids * stretched, runs.columns, place, runs.start, runs.stop, runs.kind)
    above = Runs(grids * stretched, runs.columns, place + 1, runs.start, runs.stop, runs.kind)
    line, start, stop, old, new = overlay(above, below)
    changed = old != new
    entry, within = counted((stop - start)[changed])
    column = start[changed][entry] + within
    row = (line[changed] % stretched)[entry]
    grid = (line[changed] // stretched)[entry]
    kind = new[changed][entry]
    order = torch.argsort((grid * runs.columns + column) * stretched + row)
    line, row, kind = (grid * runs.columns + column)[order], row[order], kind[order]
    # The next change in the same column ends a run. A change to EMPTY begins none.
    stop = following(row, 0)
    begins = kind != EMPTY
    return Runs(grids * runs.columns, rows, line[begins], row[begins], stop[begins], kind[begins])


def from_grid(kinds: Tensor) -> Runs:
    """Runs of a [lines, columns] grid of kinds."""
    lines, columns = kinds.shape
    padded = torch.nn.functional.pad(kinds, (1, 1))
    line, border = (padded[:, 1:] != padded[:, :-1]).nonzero(as_tuple=True)
    kind = padded[line, border + 1]
    stop = following(border, 0)
    begins = kind != EMPTY
    return Runs(lines, columns, line[begins], border[begins], stop[begins], kind[begins])


def to_grid(runs: Runs) -> Tensor:
    """The [lines, columns] grid of kinds, int8: for small grids, drawing and tests."""
    grid = torch.zeros(runs.lines, runs.columns, dtype=torch.int8, device=runs.line.device)
    entry, within = counted(runs.stop - runs.start)
    grid[runs.line[entry], runs.start[entry] + within] = runs.kind[entry].to(torch.int8)
    return grid


def column_lists(runs: Runs, kind: int, entries_at_once: int = 1 << 20) -> tuple[Tensor, Tensor]:
    """torch's (num_blocks, indices): for each line the columns of `kind` in order, then all others.

    Entries rise by one within a range and jump at its end: they are the running sum of ones and jumps.
    """
    pieces = covering(runs)
    wanted = pieces.kind == kind
    size = pieces.stop - pieces.start
    used = torch.where(wanted, size, 0)
    counts = runs.of_kind(kind).tiles()
    head = (pieces.line != preceding(pieces.line, -1)).nonzero().squeeze(-1)

    def before(amount: Tensor) -> Tensor:
        """The sum over earlier ranges of the same line."""
        running = amount.cumsum(0) - amount
        return running - running[head][pieces.line]

    unused_place = counts[pieces.line] + before(size - used)
    place = torch.where(wanted, before(used), unused_place)
    order = torch.argsort(pieces.line * runs.columns + place)
    line, place, start, stop = (x[order] for x in (pieces.line, place, pieces.start, pieces.stop))
    jump = start - preceding(stop, 0) + 1
    jump = torch.where(place == 0, start, jump).to(torch.int32)
    indices = torch.ones(runs.lines, runs.columns, dtype=torch.int32, device=runs.line.device)
    indices[line, place] = jump
    rows_at_once = max(1, entries_at_once // max(1, runs.columns))
    for rows in indices.split(rows_at_once):
        torch.cumsum(rows, dim=1, dtype=torch.int32, out=rows)
    return counts, indices


def density(runs: Runs, first_line: int, lines: int, cells: tuple[int, int], kind: int) -> Tensor:
    """The share of tiles of `kind` in each cell of a coarse picture of `lines` lines from `first_line` on."""
    rows, columns = cells
    inside = (runs.kind == kind) & (runs.line >= first_line) & (runs.line < first_line + lines)
    line, start, stop = runs.line[inside] - first_line, runs.start[inside], runs.stop[inside]
    device = line.device
    row_edges = torch.arange(rows + 1, device=device) * lines // rows
    edges = torch.arange(columns + 1, device=device) * runs.columns // columns
    overlap = torch.minimum(stop[:, None], edges[1:]) - torch.maximum(start[:, None], edges[:-1])
    row = torch.searchsorted(row_edges, line, right=True) - 1
    total = torch.zeros(rows, columns, dtype=torch.int64, device=device)
    total.index_add_(0, row, overlap.clamp(min=0))
    return total / (row_edges.diff()[:, None] * edges.diff())


def repeated(runs: Runs, source: Tensor, rows: int) -> Runs:
    """The grids of `rows` lines numbered by `source`, one after the other; a grid may come several times."""
    grids = runs.lines // rows
    counts = torch.bincount(runs.line // rows, minlength=grids)
    first = counts.cumsum(0) - counts
    grid, within = counted(counts[source])
    at = first[source][grid] + within
    line = grid * rows + runs.line[at] % rows
    return Runs(source.numel() * rows, runs.columns, line, runs.start[at], runs.stop[at], runs.kind[at])
