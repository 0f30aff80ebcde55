"""From a mask, a layout and a rank to a planned mask, by each method."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks.schedule import RunSchedule
from ..op.ring import HALVES
from . import errors
from .exchange import Traffic
from .layout import Layout
from .masks import Around, CastMask, HeadsMask, Place, RingHeadsMask, RingMask
from .plan import LEAST, Part, Side, Sides, cast, part, reads, stacked
from .portable import digest


class Groups(NamedTuple):
    """The names of process groups: of all ranks, and of a mesh's two dimensions for ring_ulysses."""

    all: str
    outer: Any = None  # this rank's place in its ring
    inner: Any = None  # and among those that share heads


def _common(mask: RunSchedule, layout: Layout, rank: int, group: str) -> dict[str, Any]:
    text = hashlib.sha256(layout.digest().encode())
    for table in mask.tensors:
        text.update(table.cpu().numpy().tobytes())
    text.update(digest(mask.mask_mod, mask.tensors[0]))
    return {
        "plan": torch.tensor([int.from_bytes(text.digest()[:7], "big"), secrets.randbits(56)]),
        "positions": layout.positions(rank),
        "mask_mod": mask.mask_mod,
        "batch": mask.batch,
        "heads": mask.heads,
        "group": group,
        "rank": rank,
        "ranks": layout.ranks,
        "length": layout.length,
        "layout": layout,
    }


def cast_mask(mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> CastMask:
    """A rank gets the blocks that it reads."""
    return _cast(mask, layout, rank, groups, reads(mask, Sides.of(mask, layout)))


def all_gather_mask(mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> CastMask:
    """A rank gets all blocks."""
    sides = Sides.of(mask, layout)
    return _cast(mask, layout, rank, groups, torch.ones(layout.ranks, sides.keys.blocks, dtype=torch.bool))


def _cast(mask: RunSchedule, layout: Layout, rank: int, groups: Groups, needs: Tensor) -> CastMask:
    sides = Sides.of(mask, layout)
    queries, keys = sides
    rows = (queries.owner() == rank).nonzero().squeeze(1)
    columns = needs[rank].nonzero().squeeze(1)
    coming = cast(keys, needs, rank)
    return CastMask(
        **_common(mask, layout, rank, groups.all),
        part=part(mask, sides, rows, queries.places()[rows], columns, coming.rows),
        picked=coming.picked,
        traffic=coming.traffic,
    )


def heads_mask(mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> HeadsMask:
    """A rank gets all blocks of some heads."""
    sides = Sides.of(mask, layout)
    blocks = [torch.arange(side.blocks) for side in sides]
    places = [_together(side, layout) for side in sides]
    inner = Place(groups.all, rank, layout.ranks)
    return HeadsMask(
        **_common(mask, layout, rank, groups.all),
        **_traffic(layout, rank, range(layout.ranks)),
        part=part(_own_heads(mask, inner), sides, blocks[0], places[0], blocks[1], places[1]),
        inner=inner,
    )


def _own_heads(mask: RunSchedule, inner: Place) -> RunSchedule:
    """The mask for those heads that a rank attends with."""
    if mask.heads == 1:
        return mask
    if mask.heads % inner.ranks:
        raise errors.heads_do_not_divide(mask.heads, inner.ranks)
    own = mask.heads // inner.ranks
    return mask[:, inner.rank * own : (inner.rank + 1) * own]


def _together(side: Side, layout: Layout, ranks: int | None = None) -> Tensor:
    """The row at which each block begins where those of each `ranks` neighbouring ranks, or all, lie together."""
    lengths = torch.tensor(layout.lengths).view(-1, ranks or layout.ranks)
    starts = (lengths.cumsum(1) - lengths).flatten()
    own = Side(layout, side.block)
    return starts[own.owner()] + own.places()


def _traffic(layout: Layout, rank: int, ranks: Sequence[int]) -> dict[str, Any]:
    """Of ranks that share heads."""
    positions = torch.cat([layout.positions(other) for other in ranks])
    local = torch.full((len(ranks),), layout.local_length(rank))
    there = Traffic(local, torch.tensor([layout.local_length(other) for other in ranks]), positions)
    return {"there": there, "back": there.back(layout.positions(rank).repeat(len(ranks)))}


def ring_mask(mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> RingMask:
    """A rank gets all blocks of one rank after the other."""
    sides = Sides.of(mask, layout)
    steps, around = _around(mask, sides, rank, [side.places() for side in sides])
    return RingMask(**_common(mask, layout, rank, groups.all), part=steps, around=around)


def _around(
    mask: RunSchedule, sides: Sides, rank: int, places: Sequence[Tensor], heads: RunSchedule | None = None
) -> tuple[Part, Around]:
    """The steps of a rank of a ring, where blocks begin at `places`. `heads` is the mask of those that it has."""
    needs, owner, ranks = reads(mask, sides), sides.keys.owner(), sides.keys.layout.ranks
    # How far the blocks of each rank travel: to the last rank that reads any.
    reader, column = needs.nonzero(as_tuple=True)
    far = torch.zeros(ranks, dtype=torch.int64)
    far.scatter_reduce_(0, owner[column], (reader - owner[column]) % ranks, "amax")
    rows = (sides.queries.owner() == rank).nonzero().squeeze(1)
    lengths = _halves(sides.keys, places[1])
    middle = lengths[owner, 0]
    second = places[1] >= middle
    read = [
        (needs[rank] & (owner == (rank - hops) % ranks) & (second == half)).nonzero().squeeze(1)
        for hops in range(ranks)
        for half in range(HALVES)
    ]
    most = max(LEAST, *(columns.numel() for columns in read))
    begins = places[1] - middle * second
    parts = [
        part(heads or mask, sides, rows, places[0][rows], columns, begins[columns], most) for columns in read
    ]
    visits = torch.tensor([columns.numel() for columns in read]).clamp(max=1)
    return stacked(parts), Around(lengths, far, visits)


def _halves(side: Side, places: Tensor) -> Tensor:
    """[ranks, HALVES]: how many rows each half of a rank's blocks has; of an odd number the first half has one more."""
    owner, found = side.owner(), []
    for rank, length in enumerate(side.layout.lengths):
        begins = [*places[owner == rank].sort().values.tolist(), length]
        middle = begins[len(begins) // 2]
        found.append([middle, length - middle])
    return torch.tensor(found)


def ring_heads_mask(mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> RingHeadsMask:
    """Ranks that share heads are one place of a ring."""
    shares = groups.inner.ranks
    outer = Layout(layout.length, layout.tile, groups.outer.ranks, tuple(r // shares for r in layout.owner))
    sides = Sides.of(mask, outer)
    places = [_together(side, layout, shares) for side in sides]
    steps, around = _around(mask, sides, groups.outer.rank, places, _own_heads(mask, groups.inner))
    first = rank // shares * shares
    return RingHeadsMask(
        **_common(mask, layout, rank, groups.all),
        **_traffic(layout, rank, range(first, first + shares)),
        part=steps,
        around=around,
        inner=groups.inner,
        outer=groups.outer,
    )


Method = Callable[[RunSchedule, Layout, int, Groups], Any]
METHODS: dict[str, Method] = {
    "cast": cast_mask,
    "all_gather": all_gather_mask,
    "ulysses": heads_mask,
    "ring": ring_mask,
    "ring_ulysses": ring_heads_mask,
}
