"""What one rank reads, sends and receives for a mask. Made on the host, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks.cut import cut_runs
from ..masks.runs import LEAST, PARTIAL, Extent, Runs, counted, merged, split
from ..masks.schedule import RunSchedule
from ..op import Inputs
from ..op.ring import HALVES
from ..visits import BlockRuns, TileMap
from ..visits.places import BATCH, HEAD, SEQUENCE
from .exchange import Cast, Traffic, picked
from .layout import Layout


class Side(NamedTuple):
    """The blocks of one side of a mask under a layout."""

    layout: Layout
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.layout.length // self.block)

    def owner(self) -> Tensor:
        """The rank of each block."""
        per_tile = self.layout.tile // self.block
        return torch.tensor(self.layout.owner, dtype=torch.int64).repeat_interleave(per_tile)[: self.blocks]

    def tokens(self) -> Tensor:
        """How many tokens each block has."""
        return (self.layout.length - torch.arange(self.blocks) * self.block).clamp(max=self.block)

    def short(self) -> Tensor:
        """Which blocks have fewer tokens than others: they are never full."""
        return self.tokens() < self.block

    def jumps(self, blocks: Tensor, rows: Tensor, count: int) -> Tensor:
        """Flags for `count` lines: whether a line does not follow the one before, in the sequence or in memory."""
        apart = (blocks.diff() != 1) | (rows.diff() != self.block)
        return torch.nn.functional.pad(apart, (1, count - blocks.numel()))[:count]

    def places(self) -> Tensor:
        """The row at which each block begins on its rank."""
        owner = self.owner()
        order = torch.argsort(owner, stable=True)
        _, within = counted(torch.bincount(owner, minlength=self.layout.ranks))
        return torch.empty_like(within).index_copy_(0, order, within * self.block)

    def lines(self, blocks: Tensor, rows: Tensor, count: int) -> Tensor:
        """`count` lines of a tile map: one for each block, which begins at its row, then empty ones."""
        zero = torch.zeros_like(blocks)
        lines = torch.stack([zero, rows, zero, zero, blocks * self.block, self.tokens()[blocks]], 1)
        return torch.nn.functional.pad(lines, (0, 0, 0, count - blocks.numel())).to(torch.int32)


class Sides(NamedTuple):
    queries: Side
    keys: Side

    @staticmethod
    def of(mask: RunSchedule, layout: Layout) -> Sides:
        return Sides(*(Side(layout, block) for block in mask.BLOCK_SIZE))


def reads(mask: RunSchedule, sides: Sides) -> Tensor:
    """Whether each rank reads each block of keys, in any batch and head: bool [ranks, blocks]."""
    runs = mask.row_runs()
    ranks, columns = sides.keys.layout.ranks, sides.keys.blocks
    reader = sides.queries.owner()[runs.line.cpu() % sides.queries.blocks]
    edges = torch.zeros(ranks * (columns + 1), dtype=torch.int64)
    edges += torch.bincount(reader * (columns + 1) + runs.start.cpu(), minlength=edges.numel())
    edges -= torch.bincount(reader * (columns + 1) + runs.stop.cpu(), minlength=edges.numel())
    return edges.view(ranks, columns + 1).cumsum(1)[:, :-1] > 0


class Part(NamedTuple):
    """What one rank computes."""

    schedule: BlockRuns
    tile_map: TileMap


def cast_keys(side: Side, needs: Tensor, rank: int) -> tuple[Cast, Tensor]:
    """What a rank receives and sends, and the row at which each block of keys that it receives begins.

    `needs` has a flag for each rank and block; a rank needs its own blocks too.
    """
    owner, tokens, ranks = side.owner(), side.tokens(), side.layout.ranks
    mine = (owner == rank).nonzero().squeeze(1)
    to, which = needs[:, mine].nonzero(as_tuple=True)
    entry, within = counted(tokens[mine[which]])
    rows = side.places()[mine[which]][entry] + within
    sent = torch.zeros(ranks, dtype=torch.int64).index_add_(0, to, tokens[mine[which]])
    # Blocks come in the order of their ranks, and of one rank in ascending order.
    read = needs[rank].nonzero().squeeze(1)
    order = torch.argsort(owner[read], stable=True)
    coming = read[order]
    begins = tokens[coming].cumsum(0) - tokens[coming]
    entry, within = counted(tokens[coming])
    came = (coming[entry] * side.block + within).to(torch.int32)
    received = torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner[coming], tokens[coming])
    made = Cast(picked(rows, side.layout.lengths[rank]), Traffic(sent, received, came))
    return made, torch.empty_like(begins).index_copy_(0, order, begins)


def part(
    mask: RunSchedule,
    sides: Sides,
    rows: Tensor,
    row_places: Tensor,
    columns: Tensor,
    column_places: Tensor,
    least: int = LEAST,
) -> Part:
    """The queries of these rows of blocks and the keys of these columns, which begin at these places in memory.

    There are entries for `least` columns at least.
    """
    runs, grids = _cpu(mask.row_runs()), mask.grids[0] * mask.grids[1]
    counts = [max(LEAST, rows.numel()), max(least, columns.numel())]
    jumps = (
        sides.queries.jumps(rows, row_places, counts[0]),
        sides.keys.jumps(columns, column_places, counts[1]),
    )
    if rows.numel() and columns.numel():
        short_row, short_column = sides.queries.short()[rows], sides.keys.short()[columns]
        cut = split(cut_runs(runs, grids, rows, columns), short_column | jumps[1][: columns.numel()])
        row = cut.line % rows.numel()
        kind = torch.where(short_row[row] | short_column[cut.start], PARTIAL, cut.kind)
        line = cut.line // rows.numel() * counts[0] + row
        chosen = merged(grids * counts[0], counts[1], line, cut.start, cut.stop, kind)
    else:
        none = runs.line[:0]
        chosen = Runs(grids * counts[0], counts[1], none, none, none, runs.kind[:0])
    lengths = (counts[0] * mask.BLOCK_SIZE[0], counts[1] * mask.BLOCK_SIZE[1])
    extent = Extent(mask.batch, mask.heads, lengths, mask.BLOCK_SIZE)
    schedule = RunSchedule.from_runs(chosen, mask.grids, extent, mask.mask_mod, jumps=jumps)
    lines = TileMap(
        sides.queries.lines(rows, row_places, counts[0]), sides.keys.lines(columns, column_places, counts[1])
    )
    return Part(BlockRuns.of(mask.BLOCK_SIZE, schedule.tensors), lines)


class RingSteps(NamedTuple):
    """The way of the keys around a ring, as in op/ring.py."""

    lengths: Tensor
    hops: Tensor
    visits: Tensor

    def rows_sent(self, rank: int) -> tuple[int, int]:
        """Rows that this rank sends: to the next one, and to the owners of blocks that end here, gradients alone."""
        passed = ended = 0
        ranks = self.hops.numel()
        for step in range(ranks):
            owner = (rank - step) % ranks
            hops, rows = int(self.hops[owner]), int(self.lengths[owner].sum())
            passed += rows * (hops > step)
            ended += rows * (hops == step > 0)
        return passed, ended


def ring_steps(
    mask: RunSchedule,
    needs: Tensor,
    sides: Sides,
    rank: int,
    rows: Tensor,
    row_places: Tensor,
    places: Tensor,
) -> tuple[Part, RingSteps]:
    """What a rank computes at each step with its `rows`; queries and keys begin at these places on their ranks."""
    owner, ranks = sides.keys.owner(), sides.keys.layout.ranks
    reader, column = needs.nonzero(as_tuple=True)
    hops = torch.zeros(ranks, dtype=torch.int64)
    hops.scatter_reduce_(0, owner[column], (reader - owner[column]) % ranks, "amax")
    lengths = _halves(sides.keys, places)
    middle = lengths[owner, 0]
    second = places >= middle
    read = [
        (needs[rank] & (owner == (rank - step) % ranks) & (second == half)).nonzero().squeeze(1)
        for step in range(ranks)
        for half in range(HALVES)
    ]
    most = max(LEAST, *(columns.numel() for columns in read))
    begins = places - middle * second
    parts = [part(mask, sides, rows, row_places[rows], columns, begins[columns], most) for columns in read]
    visits = torch.tensor([columns.numel() for columns in read]).clamp(max=1)
    return stacked(parts), RingSteps(lengths, hops, visits)


def _halves(side: Side, places: Tensor) -> Tensor:
    """[ranks, HALVES]: how many rows each half of a rank's blocks has; of an odd number the first half has one more."""
    owner, found = side.owner(), []
    for rank, length in enumerate(side.layout.lengths):
        begins = [*places[owner == rank].sort().values.tolist(), length]
        middle = begins[len(begins) // 2]
        found.append([middle, length - middle])
    return torch.tensor(found)


def stacked(parts: Sequence[Part]) -> Part:
    """Parts of the same rows as one, in the order given along the schedule's batches and the map's keys."""
    tables: list[tuple[Tensor, Tensor]] = []
    schedules = [schedule for schedule, _ in parts]
    for of_parts in zip(*(schedule.tables for schedule in schedules), strict=True):
        offsets, runs = zip(*of_parts, strict=True)
        before = torch.tensor([0, *(r.size(0) for r in runs[:-1])]).cumsum(0).tolist()
        moved = torch.cat([o + first for o, first in zip(offsets, before, strict=True)])
        tables.append((moved, torch.cat(runs)))
    keys = torch.cat([tile_map.keys for _, tile_map in parts])
    return Part(schedules[0].with_tables(tables), TileMap(parts[0].tile_map.queries, keys))


def _cpu(runs: Runs) -> Runs:
    return Runs(runs.lines, runs.columns, *(t.cpu() for t in (runs.line, runs.start, runs.stop, runs.kind)))


def inputs(part: Part, batch: Any, head: Any = 0, stand_ins: tuple[Tensor, ...] = ()) -> Inputs:
    """For a call on so many batches, whose first head is `head` to the mods."""
    schedule: Any = part.schedule
    tile_map = part.tile_map
    if isinstance(head, int) and head == 0 and isinstance(batch, int) and batch == 1:
        return Inputs(schedule=schedule, tile_map=tile_map, stand_ins=stand_ins)
    queries, keys = (lines_of_batches(lines, batch, head) for lines in tile_map)
    if batch == 1:
        return Inputs(schedule=schedule, tile_map=TileMap(queries, keys), stand_ins=stand_ins)
    rows, columns = (lines.size(0) for lines in tile_map)
    others = zip(schedule.tables, (columns, columns, rows, rows), strict=True)
    schedule = schedule.with_tables(
        [_diagonal(offsets, runs, batch, other) for (offsets, runs), other in others]
    )
    return Inputs(schedule=schedule, tile_map=TileMap(queries, keys), stand_ins=stand_ins)


def lines_of_batches(lines: Tensor, batch: Any, head: Any) -> Tensor:
    """The lines of a tile map for each batch."""
    at = torch.arange(batch, device=lines.device, dtype=lines.dtype)
    added = torch.zeros(batch, lines.size(1), device=lines.device, dtype=lines.dtype)
    added[:, BATCH], added[:, SEQUENCE], added[:, HEAD] = at, at, head
    return (lines + added[:, None]).flatten(0, 1)


def _diagonal(offsets: Tensor, runs: Tensor, batch: Any, columns: int) -> tuple[Tensor, Tensor]:
    """The runs of [batch or 1, H, lines + 1] as those of [1, H, batch * lines + 1]: each batch has its own columns."""
    grids, heads, lines = offsets.size(0), offsets.size(1), offsets.size(2) - 1
    first = offsets[..., :-1].expand(batch, heads, lines).transpose(0, 1).flatten()
    counts = offsets.diff().expand(batch, heads, lines).transpose(0, 1).flatten()
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    # There is room for all runs; entries in no line are never read.
    entry = torch.arange(runs.size(0) * (batch if grids == 1 else 1), device=runs.device)
    line = torch.searchsorted(ends[1:], entry, right=True).clamp(max=counts.size(0) - 1)
    place = (first[line] + entry - ends[line]).clamp(max=runs.size(0) - 1)
    moved = runs[place] + (line // lines % batch * columns)[:, None]
    at = torch.arange(heads, device=runs.device)[:, None] * (batch * lines)
    own = ends[at + torch.arange(batch * lines + 1, device=runs.device)]
    return own[None].to(torch.int32), moved.to(torch.int32)
