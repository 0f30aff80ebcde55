"""From a mask's graph to the runs of its tiles: large rectangles first, then only the mixed ones.

Every level asks `MaskBounds` about a list of rectangles, keeps the ones it decides, and splits the rest
by SPLIT in both directions. A single tile that stays mixed is shown to be partial by two witnesses, one
true and one false point. Only tiles without such points are evaluated in full.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runs import FULL, PARTIAL, Extent, Runs, counted, merged
from .rectangles import MaskBounds, Rectangles
from .trace import MaskGraph

SPLIT = 4
FIRST_RECTANGLES = 1 << 13
RECTANGLES_AT_ONCE = 1 << 17
POINTS_AT_ONCE = 1 << 20
WITNESSES = 64
POINTS_PER_LOOKUP = 256  # looking up one token's value costs as much as so many evaluations

Segments = tuple[Tensor, Tensor, Tensor, Tensor]


def tile_runs(mask: MaskGraph, extent: Extent) -> Runs:
    """The runs of all rows of tiles; one grid for each (b, h) the mask depends on, else a single one."""
    return _Refinement(mask, extent).run()


class _Refinement:
    def __init__(self, mask: MaskGraph, extent: Extent) -> None:
        self.mask = mask
        self.extent = extent
        self.device = mask.device
        self.batch = extent.batch if "b" in mask.reads else 1
        self.heads = extent.heads if "h" in mask.reads else 1
        self.segments: list[Segments] = []

    def run(self) -> Runs:
        rows, columns = self.extent.tiles
        grids = self.batch * self.heads
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        nothing = Runs(grids * rows, columns, none, none, none, none.to(torch.int8))
        if rows * columns == 0:
            return nothing
        self.bounds = MaskBounds(self.mask, self.extent)
        scale = 1
        while _cells(rows, scale) * _cells(columns, scale) * grids > FIRST_RECTANGLES and scale < max(
            rows, columns
        ):
            scale *= SPLIT
        per_grid = _cells(rows, scale) * _cells(columns, scale)
        grids_at_once = max(1, RECTANGLES_AT_ONCE // per_grid)
        for first in range(0, grids, grids_at_once):
            self._descend(self._top(first, min(first + grids_at_once, grids), scale))
        if not self.segments:
            return nothing
        line, start, stop, kind = (torch.cat(parts) for parts in zip(*self.segments, strict=True))
        return merged(grids * rows, columns, line, start, stop, kind)

    def _top(self, first: int, last: int, scale: int) -> Rectangles:
        rows, columns = (_cells(n, scale) for n in self.extent.tiles)
        flat = torch.arange(first * rows * columns, last * rows * columns, device=self.device)
        grid, cell = flat // (rows * columns), flat % (rows * columns)
        return Rectangles(scale, grid // self.heads, grid % self.heads, cell // columns, cell % columns)

    def _descend(self, rectangles: Rectangles) -> None:
        always, possible = self.bounds.over(rectangles)
        ragged = self._ragged(rectangles)
        if ragged is not None:
            always = always & ~ragged
        self._keep(rectangles, always, FULL)
        mixed = rectangles[(possible & ~always).nonzero().squeeze(-1)]
        if len(mixed) == 0:
            return
        if mixed.scale == 1:
            self._settle(mixed)
        else:
            # Whole rows of rectangles at a time, so that their tiles merge into few runs.
            at_once = RECTANGLES_AT_ONCE // SPLIT**2
            for start in range(0, len(mixed), at_once):
                self._descend(self._split(mixed[start : start + at_once]))

    def _ragged(self, r: Rectangles) -> Tensor | None:
        """Rectangles that reach beyond the sequences; the missing tokens count as masked out."""
        found = None
        for tile, length, block in zip((r.q, r.kv), self.extent.lengths, self.extent.block, strict=True):
            if length % block:
                beyond = (tile + 1) * (r.scale * block) > length
                found = beyond if found is None else found | beyond
        return found

    def _split(self, r: Rectangles) -> Rectangles:
        scale = r.scale // SPLIT
        rows, columns = (_cells(n, scale) for n in self.extent.tiles)
        step = torch.arange(SPLIT, device=self.device)
        q = (r.q[:, None, None] * SPLIT + step[:, None]).expand(-1, SPLIT, SPLIT).reshape(-1)
        kv = (r.kv[:, None, None] * SPLIT + step).expand(-1, SPLIT, SPLIT).reshape(-1)
        b, h = (x[:, None].expand(-1, SPLIT**2).reshape(-1) for x in (r.b, r.h))
        children = Rectangles(scale, b, h, q, kv)
        if rows % SPLIT or columns % SPLIT:
            return children[((q < rows) & (kv < columns)).nonzero().squeeze(-1)]
        return children

    def _keep(self, r: Rectangles, which: Tensor, kind: int) -> None:
        """Records the chosen rectangles as segments of tile rows, neighbours merged first."""
        chosen = r[which.nonzero().squeeze(-1)]
        if len(chosen) == 0:
            return
        rows, columns = self.extent.tiles
        grid_rows, grid_columns = _cells(rows, r.scale), _cells(columns, r.scale)
        line = (chosen.b * self.heads + chosen.h) * grid_rows + chosen.q
        kinds = torch.full_like(line, kind, dtype=torch.int8)
        runs = merged(
            self.batch * self.heads * grid_rows, grid_columns, line, chosen.kv, chosen.kv + 1, kinds
        )
        if r.scale == 1:
            self.segments.append((runs.line, runs.start, runs.stop, runs.kind))
            return
        row = runs.line % grid_rows * r.scale
        entry, within = counted((rows - row).clamp(max=r.scale))
        tile_line = (runs.line // grid_rows * rows + row)[entry] + within
        stop = (runs.stop * r.scale).clamp(max=columns)
        self.segments.append((tile_line, runs.start[entry] * r.scale, stop[entry], runs.kind[entry]))

    def _settle(self, tiles: Rectangles) -> None:
        """Decides mixed tiles by evaluating the mask."""
        ragged = self._ragged(tiles)
        false_seen = ragged if ragged is not None else torch.zeros_like(tiles.q, dtype=torch.bool)
        seen = torch.stack([torch.zeros_like(false_seen), false_seen])
        corners = self._corner_points()
        undecided = self._witness(tiles, seen, torch.arange(len(tiles), device=self.device), corners)
        undecided = self._witness(tiles, seen, undecided, self._scattered_points())
        block_q, block_kv = self.extent.block
        if undecided.numel() * block_q * block_kv > POINTS_PER_LOOKUP * sum(self.extent.lengths):
            always, possible = self.bounds.over(tiles[undecided], look_up=True)
            undecided = undecided[(possible & ~always).nonzero().squeeze(-1)]
        self._exhaust(tiles, seen, undecided)
        true_seen, false_seen = seen
        self._keep(tiles, true_seen & ~false_seen, FULL)
        self._keep(tiles, true_seen & false_seen, PARTIAL)

    def _corner_points(self) -> tuple[Tensor, Tensor]:
        last_q, last_kv = (n - 1 for n in self.extent.block)
        return (
            torch.tensor([last_q, 0, 0, last_q], device=self.device),
            torch.tensor([0, last_kv, 0, last_kv], device=self.device),
        )

    def _scattered_points(self) -> tuple[Tensor, Tensor]:
        """A fixed sequence that fills the tile evenly: no random state is touched."""
        n = torch.arange(1, WITNESSES + 1, dtype=torch.float64, device=self.device)
        block_q, block_kv = self.extent.block
        return (
            ((n * 0.7548776662466927 % 1) * block_q).long(),
            ((n * 0.5698402909980532 % 1) * block_kv).long(),
        )

    def _witness(
        self, tiles: Rectangles, seen: Tensor, which: Tensor, points: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Evaluates the points of each tile; returns the tiles that have not shown both values."""
        function = torch.vmap(self.mask.function(self.mask.output))
        count = points[0].numel()
        if which.numel() == 0:
            return which
        left = []
        for part in which.split(max(1, POINTS_AT_ONCE // 4 // count)):
            r = tiles[part]
            q, kv = (
                (tile[:, None] * block + offset).clamp(max=length - 1).reshape(-1)
                for tile, offset, block, length in zip(
                    (r.q, r.kv), points, self.extent.block, self.extent.lengths, strict=True
                )
            )
            b, h = (x[:, None].expand(-1, count).reshape(-1) for x in (r.b, r.h))
            left.append(self._note(seen, part, function(b, h, q, kv).view(-1, count)))
        return torch.cat(left)

    def _note(self, seen: Tensor, part: Tensor, values: Tensor) -> Tensor:
        # On CPU, amax over bytes is twenty times as fast as any() over booleans.
        points = values.view(torch.uint8)
        true_seen = seen[0][part] | (points.amax(1) != 0)
        false_seen = seen[1][part] | (points.amin(1) == 0)
        seen[0][part], seen[1][part] = true_seen, false_seen
        return part[(~(true_seen & false_seen)).nonzero().squeeze(-1)]

    def _exhaust(self, tiles: Rectangles, seen: Tensor, undecided: Tensor) -> None:
        """Evaluates every point of the undecided tiles, band by band until both values have been seen."""
        block_q, block_kv = self.extent.block
        band = max(1, block_q // 8)
        function = self.mask.function(self.mask.output)
        for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
            function = torch.vmap(function, in_dims=dims)
        columns = torch.arange(block_kv, device=self.device)
        at_once = max(1, POINTS_AT_ONCE // (band * block_kv))
        for first in range(0, block_q, band):
            if undecided.numel() == 0:
                return
            rows = torch.arange(first, min(first + band, block_q), device=self.device)
            left = []
            for part in undecided.split(at_once):
                r = tiles[part]
                q = (r.q[:, None] * block_q + rows).clamp(max=self.extent.lengths[0] - 1)
                kv = (r.kv[:, None] * block_kv + columns).clamp(max=self.extent.lengths[1] - 1)
                values = function(r.b, r.h, q, kv)
                left.append(self._note(seen, part, values.reshape(part.numel(), -1)))
            undecided = torch.cat(left)


def _cells(tiles: int, scale: int) -> int:
    return -(-tiles // scale)
