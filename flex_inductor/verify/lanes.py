"""Results of mods and entries of a schedule, lane by lane. Shares no code with the computation of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..mod_ir.program import AXES, LaneProgram
from ..visits import BlockRuns


def on_lanes(
    program: LaneProgram,
    lanes: dict[str, Tensor],
    live: Tensor | None,
    captures: Sequence[Tensor],
    invariants: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The program's results for every lane of a tile: [b, h, q_idx, kv_idx, ...]."""
    shape = [lanes[axis].numel() for axis in AXES]
    everywhere = torch.ones((1,) * len(AXES), dtype=torch.bool, device=lanes["b"].device)

    def at_each_lane(tensor: Tensor) -> Tensor:
        return tensor.expand(shape).reshape(-1)

    given = []
    for name in program.lanes:
        along = AXES.index(name) if name in AXES else None
        tensor = lanes[name]
        given.append(at_each_lane(tensor if along is None else _along(tensor, along)))
    for axes in program.guards:
        flags = everywhere if live is None else live
        for dim, axis in enumerate(AXES):
            if axis not in axes:
                flags = flags.any(dim, keepdim=True)
        given.append(at_each_lane(flags))
    in_dims = (0,) * len(given) + (None,) * (len(captures) + len(invariants))
    with compat.vmap_allowed():
        results = torch.vmap(program.lane, in_dims)(*given, *captures, *invariants)
    return tuple(result.reshape(*shape, *result.shape[1:]) for result in results)


def _along(tensor: Tensor, dim: int) -> Tensor:
    return tensor.view([-1 if other == dim else 1 for other in range(len(AXES))])


class Visited:
    """Which blocks a schedule visits, row by row. Bounds add nothing to the mask_mod beside them."""

    PARTIAL, FULL = 1, 2

    def __init__(self, schedule: BlockRuns, columns: int, device: torch.device):
        self.runs, self.columns, self.device, self.grids = schedule, columns, device, schedule.grids
        tables = [None if table is None else [t.tolist() for t in table] for table in schedule.side("keys")]
        self.tables = [*zip((self.PARTIAL, self.FULL), tables, strict=True)]
        self.rows: dict[tuple[int, int, int], Tensor] = {}

    def row(self, b: int, h: int, row: int) -> Tensor:
        """The kind of each block that a row of blocks could visit; 0 for those that it does not."""
        place = (min(b, self.grids[0] - 1), min(h, self.grids[1] - 1), row)
        if place not in self.rows:
            self.rows[place] = self._read(*place)
        return self.rows[place]

    def _read(self, b: int, h: int, row: int) -> Tensor:
        kinds = torch.zeros(self.columns, dtype=torch.int8)
        for kind, table in self.tables:
            if table is None:
                continue
            offsets, runs = table
            if self.runs.of_one:
                kinds[runs[b][h][row][: offsets[b][h][row]]] = kind
                continue
            for start, stop in runs[offsets[b][h][row] : offsets[b][h][row + 1]]:
                kinds[start:stop] = kind
        return kinds.to(self.device)

    def blocks(self, b: slice, h: slice, rows: Sequence[int]) -> Tensor:
        """The kinds of all blocks of these rows: [b, h, rows, columns]."""
        found = [[[self.row(i, j, row) for row in rows] for j in _range(h)] for i in _range(b)]
        return torch.stack([torch.stack([torch.stack(of_h) for of_h in of_b]) for of_b in found])

    def lanes(self, b: slice, h: slice, m: slice, n: slice) -> tuple[Tensor, Tensor]:
        """Flags for each lane: in a visited block, and in a full one."""
        first, last = m.start // self.runs.q_block, (m.stop - 1) // self.runs.q_block
        kinds = self.blocks(b, h, range(first, last + 1))
        rows, columns = (torch.arange(at.start, at.stop, device=self.device) for at in (m, n))
        kinds = kinds[:, :, rows // self.runs.q_block - first][..., columns // self.runs.kv_block]
        return kinds > 0, kinds == self.FULL


def _range(at: slice) -> range:
    return range(at.start, at.stop)
