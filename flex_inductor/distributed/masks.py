"""Planned masks: one rank's part of a mask, and what it exchanges before it attends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compat import mark_changing
from ..masks.planned import PlannedMask, Wants
from ..mod_ir.arguments import score_dtype
from ..op import Inputs
from ..op.ring import Ring
from ..visits import BlockRuns
from ..visits.places import BATCH, HEAD, SEQUENCE, TileMap
from . import errors
from .choose import MethodChoice
from .dtensors import lifted, local_tensors
from .exchange import Picked, Traffic, cast, move, process_group
from .layout import Layout
from .plan import Part
from .portable import portable

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None
Call = Callable[[Tensor, Tensor, Tensor, MaskMod, Inputs], tuple[Tensor, Tensor, Tensor]]


OUTPUT_ALONE = Wants(lse=False, max_scores=False)


class Place(NamedTuple):
    """Of this rank in a process group."""

    group: str
    rank: int
    ranks: int


class Sent(NamedTuple):
    """Bytes that one call has this rank send to others."""

    forward: int
    backward: int


@dataclass(eq=False)
class Sharded(PlannedMask):
    """What all of them have. Compiled code guards on what it reads, and what changes with the mask is in tensors."""

    part: Part
    plan: Tensor  # int64 [2]: a number for the plan, the same on all ranks, and one for this time that it was made
    positions: Tensor  # int32, of this rank's tokens in the whole sequence
    mask_mod: MaskMod
    batch: int  # that the mask tells apart, or 1
    heads: int
    group: str
    rank: int
    ranks: int
    length: int
    layout: Layout
    choice: MethodChoice | None = field(default=None, kw_only=True)  # of its plan's method

    def chosen_by(self, choice: MethodChoice) -> Sharded:
        return dataclasses.replace(self, choice=choice)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask_mod": portable(self.mask_mod, self.positions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.marked()

    def marked(self) -> Sharded:
        """Itself, with marks on the sizes that differ between masks of the same shape."""
        for tensor in self._changing():
            mark_changing(tensor, tensor.dim() - 1 if tensor.dim() == 3 else 0)
        return self

    def _changing(self) -> list[Tensor]:
        schedule, tile_map = self.part
        offsets = [schedule.q_offsets, schedule.full_q_offsets]
        runs = [schedule.kv_runs, schedule.full_kv_runs, schedule.q_runs, schedule.full_q_runs]
        return [*offsets, *runs, tile_map.keys]

    def check(self, query: Tensor, key: Tensor) -> None:
        standing = _standing(self.group)
        if standing is None:
            raise errors.other_group(self.group)
        rank, ranks = standing
        if rank != self.rank or ranks != self.ranks:  # torch 2.11 does not compile a comparison of tuples
            raise errors.other_ranks((self.rank, self.ranks), standing)
        for name, tensor in (("query", query), ("key", key)):
            if tensor.size(2) != self.positions.size(0):
                raise errors.wrong_local_length(
                    name, tensor.size(2), self.positions.size(0), self.rank, self.length
                )
        for name, planned, got in (
            ("batches", self.batch, query.size(0)),
            ("heads", self.heads, query.size(1)),
        ):
            if planned not in (1, got):
                raise errors.batch(name, planned, got)

    def local(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, Callable[[Any], Any], int]:
        if not any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            return query, key, value, _itself, 0
        return local_tensors(query, key, value, self.group, self.heads, self.length)

    def lifted(self, score_mod: Any, query: Any, local_query: Tensor) -> tuple[Any, tuple[Any, ...]]:
        if score_mod is None or torch.compiler.is_dynamo_compiling():
            return score_mod, ()
        return lifted(score_mod, query, local_query, self.layout, self.rank, self.group)

    def _called(self, call: Call, query: Tensor, key: Tensor, value: Tensor, here: Inputs) -> Any:
        # _replace fails in graphs of torch 2.11.
        changed: dict[str, Any] = dict(zip(Inputs._fields, here, strict=True))
        changed["sharded"] = self.positions.size(0), self.length
        here = Inputs(**changed)
        if torch.compiler.is_dynamo_compiling():
            return call(query, key, value, self.mask_mod, here)
        try:
            return call(query, key, value, self.mask_mod, here)
        except IndexError as error:
            raise errors.local_capture(self.length, self.positions.size(0)) from error

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: Wants = OUTPUT_ALONE) -> Sent:
        """Of a call with such tensors; `wants` says what it returns beside its output."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Any:
        """The tensors moved, but for counts that the host reads; what mask_mod captures stays where it is."""
        moved = {
            name: pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), getattr(self, name))
            for name in _tensor_fields(type(self))
        }
        for name, value in moved.items():
            if isinstance(value, Traffic):
                moved[name] = value._replace(sent=value.sent.cpu(), received=value.received.cpu())
        moved |= {name: getattr(self, name) for name in ON_HOST if name in moved}
        return dataclasses.replace(self, **moved).marked()


CONSTANT = (
    "mask_mod",
    "batch",
    "heads",
    "group",
    "rank",
    "ranks",
    "length",
    "layout",
    "choice",
    "inner",
    "outer",
)
ON_HOST = ("plan", "around")


@dataclass(eq=False)
class CastMask(Sharded):
    """Each rank gets the blocks of keys that it reads, or all of them, and attends once."""

    picked: Picked
    traffic: Traffic

    def _changing(self) -> list[Tensor]:
        return [*super()._changing(), self.picked.rows, self.picked.home, self.traffic.came]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, wants: Wants, head: int) -> Any:
        key, value, stand_ins = cast(key, value, self.picked, self.traffic, self.group, self.plan)
        here = inputs(self.part, query.size(0), head, stand_ins)
        return self._called(call, query, key, value, here)

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: Wants = OUTPUT_ALONE) -> Sent:
        row = _row_bytes(key) + _row_bytes(value)
        gradient = row // key.dtype.itemsize * score_dtype(key.dtype).itemsize
        return Sent(
            row * _others(self.traffic.sent, self.rank), gradient * _others(self.traffic.received, self.rank)
        )


@dataclass(eq=False)
class HeadsMask(Sharded):
    """Ulysses: each rank attends with some of the heads, to the whole sequence."""

    there: Traffic
    back: Traffic
    inner: Place  # of this rank among those that share heads

    def check(self, query: Tensor, key: Tensor) -> None:
        super().check(query, key)
        if query.size(1) % self.inner.ranks:
            raise errors.heads_do_not_divide(query.size(1), self.inner.ranks)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, wants: Wants, head: int) -> Any:
        parts = [self._by_rank(tensor) for tensor in (query, key, value)]
        rows = torch.cat([p.flatten(2) for p in parts], -1).flatten(0, 1)
        came = move(rows, self.there, self.inner.group, self.plan)
        query, key, value = (
            rows.unflatten(-1, p.shape[2:]).permute(1, 2, 0, 3)
            for rows, p in zip(came.split([p.shape[2:].numel() for p in parts], -1), parts, strict=True)
        )
        here = self._inputs(query.size(0), head + self.inner.rank * query.size(1))
        out, lse, max_scores = self._called(call, query, key, value, here)
        # What nobody asked for stays where it is.
        return (
            self._home(out),
            self._home(lse.unsqueeze(-1)).squeeze(-1) if wants.lse else lse,
            self._home(max_scores.unsqueeze(-1)).squeeze(-1) if wants.max_scores else max_scores,
        )

    def _inputs(self, batch: Any, head: Any) -> Inputs:
        return inputs(self.part, batch, head)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """[B, H, local, D] as [ranks, local, B, H / ranks, D]; heads that ranks cannot share alike are repeated."""
        repeats = 1
        while tensor.size(1) * repeats % self.inner.ranks:
            repeats += 1
        tensor = tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor
        return tensor.unflatten(1, (self.inner.ranks, -1)).permute(1, 3, 0, 2, 4)

    def _home(self, tensor: Tensor) -> Tensor:
        """[B, H / ranks, whole, D] as [B, H, local, D]."""
        came = move(tensor.permute(2, 0, 1, 3), self.back, self.inner.group)
        return (
            came.unflatten(0, (self.inner.ranks, self.positions.size(0))).permute(2, 0, 3, 1, 4).flatten(1, 2)
        )

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: Wants = OUTPUT_ALONE) -> Sent:
        heads = [self._by_rank(t).size(3) for t in (query, key, value)]
        came = query.size(0) * sum(
            n * t.size(3) * t.dtype.itemsize for n, t in zip(heads, (query, key, value), strict=True)
        )
        out = query.size(0) * heads[0] * value.size(3) * query.dtype.itemsize
        lse = query.size(0) * heads[0] * score_dtype(query.dtype).itemsize
        there, back = (_others(traffic.sent, self.inner.rank) for traffic in (self.there, self.back))
        return Sent(
            came * there + (out + lse * (wants.lse + wants.max_scores)) * back,
            came * back + (out + lse * wants.lse) * there,
        )


class Around(NamedTuple):
    """What goes around a ring, as in op/ring.py."""

    lengths: Tensor
    far: Tensor
    visits: Tensor

    def ring(self, place: Place, plan: Tensor) -> Ring:
        return Ring(place.group, place.rank, plan, *self)

    def bytes_sent(self, place: Place, row: int, gradient: int) -> Sent:
        """`row` and `gradient` are of one token."""
        passed = ended = 0
        for step in range(place.ranks):
            owner = (place.rank - step) % place.ranks
            far, rows = int(self.far[owner]), int(self.lengths[owner].sum())
            passed += rows * (far > step)
            ended += rows * (far == step > 0)  # its gradient goes home
        return Sent(row * passed, (row + gradient) * passed + gradient * ended)


@dataclass(eq=False)
class RingMask(Sharded):
    """Keys come around a ring of ranks. The part has an entry for each step."""

    around: Around

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, wants: Wants, head: int) -> Any:
        schedule, (queries, keys) = self.part
        tile_map = TileMap(_lines(queries, 1, head), keys)
        ring = self.around.ring(Place(self.group, self.rank, self.ranks), self.plan)
        return self._called(call, query, key, value, Inputs(schedule=schedule, tile_map=tile_map, ring=ring))

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: Wants = OUTPUT_ALONE) -> Sent:
        row = _row_bytes(key) + _row_bytes(value)
        gradient = row // key.dtype.itemsize * score_dtype(key.dtype).itemsize
        return self.around.bytes_sent(Place(self.group, self.rank, self.ranks), row, gradient)


@dataclass(eq=False)
class RingHeadsMask(HeadsMask):
    """Ranks that share heads are one place of a ring, around which the keys of all their tokens come."""

    around: Around
    outer: Place  # in the ring

    def _inputs(self, batch: Any, head: Any) -> Inputs:
        schedule, (queries, keys) = self.part
        tile_map = TileMap(_lines(queries, 1, head), keys)
        return Inputs(schedule=schedule, tile_map=tile_map, ring=self.around.ring(self.outer, self.plan))

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: Wants = OUTPUT_ALONE) -> Sent:
        shared = super().bytes_sent(query, key, value, wants)
        elements = sum(self._by_rank(t).size(3) * t.size(3) for t in (key, value)) * key.size(0)
        gradient = elements * score_dtype(key.dtype).itemsize
        around = self.around.bytes_sent(self.outer, elements * key.dtype.itemsize, gradient)
        return Sent(*(one + other for one, other in zip(shared, around, strict=True)))


def _others(rows: Tensor, rank: int) -> int:
    """The sum over all ranks but this one."""
    return int(rows.sum() - rows[rank])


def _itself(result: Any) -> Any:
    return result


def _row_bytes(tensor: Tensor) -> int:
    """Of one token's."""
    return tensor.size(0) * tensor.size(1) * tensor.size(3) * tensor.dtype.itemsize


def inputs(part: Part, batch: Any, head: Any = 0, stand_ins: tuple[Tensor, ...] = ()) -> Inputs:
    """For a call on so many batches, whose first head is `head` to the mods."""
    schedule: Any = part.schedule
    tile_map = part.tile_map
    if isinstance(head, int) and head == 0 and isinstance(batch, int) and batch == 1:
        return Inputs(schedule=schedule, tile_map=tile_map, stand_ins=stand_ins)
    queries, keys = (_lines(lines, batch, head) for lines in tile_map)
    if batch == 1:
        return Inputs(schedule=schedule, tile_map=TileMap(queries, keys), stand_ins=stand_ins)
    rows, columns = (lines.size(0) for lines in tile_map)
    others = zip(schedule.tables, (columns, columns, rows, rows), strict=True)
    schedule = schedule.with_tables(
        _diagonal(table.offsets, table.runs, batch, other) for table, other in others
    )
    return Inputs(schedule=schedule, tile_map=TileMap(queries, keys), stand_ins=stand_ins)


def _lines(lines: Tensor, batch: Any, head: Any) -> Tensor:
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
    # There is room for all runs; what no line has is left unread.
    entry = torch.arange(runs.size(0) * (batch if grids == 1 else 1), device=runs.device)
    line = torch.searchsorted(ends[1:], entry, right=True).clamp(max=counts.size(0) - 1)
    place = (first[line] + entry - ends[line]).clamp(max=runs.size(0) - 1)
    moved = runs[place] + (line // lines % batch * columns)[:, None]
    at = torch.arange(heads, device=runs.device)[:, None] * (batch * lines)
    own = ends[at + torch.arange(batch * lines + 1, device=runs.device)]
    return own[None].to(torch.int32), moved.to(torch.int32)


def _standing(group: str) -> tuple[int, int] | None:
    """The rank of this process in a group, and how many there are; None where it is not in that group."""
    try:
        found = process_group(group)
    except (KeyError, RuntimeError, ValueError, TypeError):
        return None
    return dist.get_rank(found), dist.get_world_size(found)


_standing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _flatten(mask: Sharded) -> tuple[list[Any], tuple[Any, ...]]:
    others = [getattr(mask, name) for name in _tensor_fields(type(mask)) if name != "part"]
    constants = tuple((name, getattr(mask, name)) for name in CONSTANT if hasattr(mask, name))
    schedule = mask.part.schedule
    blocks, tables = schedule[:2], schedule.tables
    return [tables, mask.part.tile_map, *others], (type(mask), blocks, constants)


def _unflatten(parts: Any, context: tuple[Any, ...]) -> Sharded:
    kind, blocks, constants = context
    tables, tile_map, *others = parts
    names = [name for name in _tensor_fields(kind) if name != "part"]
    part = Part(BlockRuns.of(blocks, (tensor for table in tables for tensor in table)), tile_map)
    return kind(part=part, **dict(zip(names, others, strict=True)), **dict(constants))


def _tensor_fields(kind: type[Sharded]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in CONSTANT]


for _kind in (CastMask, HeadsMask, RingMask, RingHeadsMask):
    pytree.register_pytree_node(
        _kind, _flatten, _unflatten, serialized_type_name=f"flex_inductor.{_kind.__name__}"
    )
