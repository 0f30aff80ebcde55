"""Planned masks: one rank's part of a mask, and what it exchanges around attention.

A method is a composition of two steps. First, ranks that share heads exchange queries, keys and values, until each has
all their tokens and some of the heads: ulysses, and the second dimension of ring_ulysses. Then keys and values arrive:
at once, only those read (cast) or all (all_gather), or block by block around a ring. In ulysses they are all there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..checks import refused
from ..compat import mark_changing, run_while_traced
from ..errors import FlexError, derivative_of_shards, planned_in_vmap
from ..masks import planned, portable
from ..masks.schedule import RunSchedule
from ..mod_ir.arguments import score_dtype
from ..op import Inputs, untraced
from ..op.autograd import has_tangent
from ..op.ring import Ring
from ..op.vmap import in_vmap
from ..softmax import AuxRequest, Softmax
from ..visits import BlockRuns
from . import errors
from .cost import MethodChoice
from .dtensors import lifted, local_tensors, whole
from .exchange import Cast, Traffic, move, process_group, send_keys
from .layout import Layout
from .plan import Part, RingSteps, Side, Sides, cast_keys, inputs, part, reads, ring_steps
from .ring import ring_inputs


class CpGroup(NamedTuple):
    """A process group by its name, the rank of this process in it, and how many there are."""

    name: str
    rank: int
    size: int


OUTPUT_ALONE = AuxRequest()


class Sent(NamedTuple):
    """Bytes that this rank sends to others in one call."""

    forward: int
    backward: int


@dataclass(eq=False)
class PlannedMask(planned.PlannedMask):
    """One rank's part of a mask.

    Compiled code guards on the plain fields. What differs between masks of one shape is in tensors.
    """

    part: Part
    plan: Tensor  # int64 [2]: the plan's number, the same on all ranks, and one for each time that it is made
    positions: Tensor  # int32, of this rank's tokens in the whole sequence
    mask_mod: Callable
    batch: int  # numbers that the mask tells apart, or 1
    heads: int
    layout: Layout
    cp_group: CpGroup
    heads_group: CpGroup  # the ranks that share heads; one for itself in methods without
    ring_group: CpGroup  # those that keys travel to
    to_heads: Traffic | None = None  # tokens to the ranks that share heads
    to_tokens: Traffic | None = None  # and outputs to the ranks of their tokens
    cast: Cast | None = None  # keys and values that come at once
    ring: RingSteps | None = None  # or around a ring
    choice: MethodChoice | None = None  # of its plan's method

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask_mod": portable.portable(self.mask_mod, self.positions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.marked()

    def marked(self) -> PlannedMask:
        """Itself, with its sizes marked that differ between masks of the same shape."""
        schedule, tile_map = self.part
        changing = [schedule.q_offsets, schedule.full_q_offsets, tile_map.keys]
        changing += [schedule.kv_runs, schedule.full_kv_runs, schedule.q_runs, schedule.full_q_runs]
        if self.cast is not None:
            changing += [self.cast.picked.rows, self.cast.picked.by_row, self.cast.traffic.came]
        for tensor in changing:
            if tensor is not None:
                mark_changing(tensor, tensor.dim() - 1 if tensor.dim() == 3 else 0)
        return self

    def to(self, device: torch.device | str) -> PlannedMask:
        """Moves the tensors, except counts that the host reads and captures of mask_mod."""

        def moved(value: Any) -> Any:
            if isinstance(value, Traffic):
                return value._replace(came=value.came.to(device))
            return value.to(device) if isinstance(value, Tensor) else value

        changed = {
            name: pytree.tree_map(moved, getattr(self, name), is_leaf=lambda v: isinstance(v, Traffic))
            for name in _tensors_of(self)
            if name not in ("plan", "ring")
        }
        return dataclasses.replace(self, **changed).marked()

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any,
        checks: Callable[..., None],
        call: Callable[..., Any],
        wanted: AuxRequest,
        softmax: Softmax,
    ) -> Any:
        given, head = query, 0
        like_query: Callable[[Any], Any] = _itself
        captures: tuple[Any, ...] = ()
        try:
            if not torch.compiler.is_dynamo_compiling() and in_vmap():
                raise planned_in_vmap()
            if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
                query, key, value, like_query, head = local_tensors(
                    query, key, value, self.cp_group.name, self.heads, self.layout.length
                )
            checks(query, key, value)
            self._check(query, key, value)
            if softmax.sinks is not None:
                cp = self.cp_group
                sinks = whole(softmax.sinks, given, self.layout, cp.rank, cp.name)
                softmax = softmax._replace(sinks=sinks)
                if isinstance(given, DTensor):  # heads may be spread over other ranks
                    softmax.check(given)
                    softmax = softmax.of_heads(head, query.size(1))
            softmax.check(query)
            if score_mod is not None and not torch.compiler.is_dynamo_compiling():
                score_mod, captures = lifted(
                    score_mod, given, query, self.layout, self.cp_group.rank, self.cp_group.name
                )
        except FlexError as error:
            refused(error)
        if self.to_heads is not None:
            query, key, value = self._share_heads(self.to_heads, query, key, value)
            first = self.heads_group.rank * query.size(1)
            head, softmax = head + first, softmax.of_heads(first, query.size(1))
        if self.ring is not None:
            name, rank, _ = self.ring_group
            here = ring_inputs(self.part, Ring(name, rank, self.plan, *self.ring), head)
        elif self.cast is not None:
            key, value, stand_ins = send_keys(key, value, self.cast, self.cp_group.name, self.plan)
            here = inputs(self.part, query.size(0), head, stand_ins)
        else:
            here = inputs(self.part, query.size(0), head)
        # _replace fails in graphs of torch 2.11.
        fields: dict[str, Any] = dict(zip(Inputs._fields, here, strict=True))
        fields["sharded"] = self.positions.size(0), self.layout.length
        if captures:
            fields["score_captures"] = captures
        fields.update(softmax.inputs(query))
        fields["in_blocks"] = "dropout" in fields
        here = Inputs(**fields)
        if torch.compiler.is_dynamo_compiling():
            results = call(query, key, value, score_mod, self.mask_mod, here)
        else:
            try:
                results = call(query, key, value, score_mod, self.mask_mod, here)
            except IndexError as error:
                raise errors.local_capture(self.layout.length, self.positions.size(0)) from error
        if self.to_tokens is not None:
            results = self._share_tokens(self.to_tokens, results, wanted)
        return tuple(map(like_query, results))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        name, cp_rank, cp_size = self.cp_group
        standing = _standing(name)
        if standing is None:
            raise errors.other_group(name)
        rank, size = standing
        if rank != cp_rank or size != cp_size:  # torch 2.11 does not compile a comparison of tuples
            raise errors.other_ranks((cp_rank, cp_size), standing)
        if not torch.compiler.is_dynamo_compiling() and any(map(has_tangent, (query, key, value))):
            raise derivative_of_shards()
        of_plan = (self.positions, self.layout.length, cp_rank, self.batch, self.heads, self.heads_group.size)
        untraced(_check_sizes, query, key, *of_plan)

    def _share_heads(self, traffic: Traffic, *tensors: Tensor) -> list[Tensor]:
        """[B, H, local, D] as [B, H / ranks, tokens of all ranks that share heads, D]."""
        parts = [self._by_rank(tensor) for tensor in tensors]
        rows = torch.cat([p.flatten(2) for p in parts], -1).flatten(0, 1)
        came = move(rows, traffic, self.heads_group.name, self.plan)
        each = came.split([p.shape[2:].numel() for p in parts], -1)
        return [
            rows.unflatten(-1, p.shape[2:]).permute(1, 2, 0, 3) for rows, p in zip(each, parts, strict=True)
        ]

    def _share_tokens(self, traffic: Traffic, results: Any, wants: AuxRequest) -> Any:
        """The way back. Results that nobody asked for stay as they are."""
        out, *of_rows = results
        asked_for = (wants.reads_lse, wants.max_scores, *(True for _ in wants.more))
        return self._local(traffic, out), *(
            self._local(traffic, rows.unsqueeze(-1)).squeeze(-1) if want else rows
            for rows, want in zip(of_rows, asked_for, strict=True)
        )

    def _local(self, traffic: Traffic, tensor: Tensor) -> Tensor:
        came = move(tensor.permute(2, 0, 1, 3), traffic, self.heads_group.name)
        by_rank = came.unflatten(0, (self.heads_group.size, self.positions.size(0)))
        return by_rank.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """[B, H, local, D] as [ranks, local, B, H / ranks, D]; heads that do not divide among ranks are repeated."""
        repeats, ranks = 1, self.heads_group.size
        while tensor.size(1) * repeats % ranks:
            repeats += 1
        tensor = tensor.repeat_interleave(repeats, 1) if repeats > 1 else tensor
        return tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4)

    def bytes_sent(self, query: Tensor, key: Tensor, value: Tensor, wants: AuxRequest = OUTPUT_ALONE) -> Sent:
        """The bytes of a call with such tensors; `wants` says what it returns beside its output."""
        tensors = (query, key, value)
        heads = [self._by_rank(t).size(3) for t in tensors]
        # Bytes of one token: the query, key and value, the gradients of the last two, the output and a logsumexp.
        rows = [query.size(0) * n * t.size(3) for n, t in zip(heads, tensors, strict=True)]
        item, wide = query.dtype.itemsize, score_dtype(query.dtype).itemsize
        row, gradient = (rows[1] + rows[2]) * item, (rows[1] + rows[2]) * wide
        forward = backward = 0
        if self.to_heads is not None and self.to_tokens is not None:
            out, lse = query.size(0) * heads[0] * value.size(3) * item, query.size(0) * heads[0] * wide
            tokens, outputs = (
                _others(t.sent, self.heads_group.rank) for t in (self.to_heads, self.to_tokens)
            )
            differentiable = wants.reads_lse + wants.entropy
            indices = query.size(0) * heads[0] * wants.max_indices * torch.int64.itemsize
            beside = lse * (differentiable + wants.max_scores) + indices
            forward += sum(rows) * item * tokens + (out + beside) * outputs
            backward += sum(rows) * item * outputs + (out + lse * differentiable) * tokens
        if self.cast is not None:
            forward += row * _others(self.cast.traffic.sent, self.cp_group.rank)
            backward += gradient * _others(self.cast.traffic.received, self.cp_group.rank)
        if self.ring is not None:
            passed, ended = self.ring.rows_sent(self.ring_group.rank)
            forward += row * passed
            backward += (row + gradient) * passed + gradient * ended
        return Sent(forward, backward)


class Groups(NamedTuple):
    """The process group of all ranks by its name, and for ring_ulysses those of a mesh's two dimensions."""

    name: str
    ring: CpGroup | None = None
    heads: CpGroup | None = None
    holders: tuple[int, ...] = ()  # the place of each rank in the ring


def plan_mask(method: str, mask: RunSchedule, layout: Layout, rank: int, groups: Groups) -> PlannedMask:
    """The part of one rank."""
    everyone = CpGroup(groups.name, rank, layout.ranks)
    heads = {"ulysses": everyone, "ring_ulysses": groups.heads}.get(method) or CpGroup(groups.name, 0, 1)
    shares = heads.size
    # Ranks that share heads hold their tokens together.
    of_mesh = groups.holders if method == "ring_ulysses" else ()
    holders = torch.tensor(of_mesh or [other // shares for other in range(layout.ranks)])
    holder, owner = int(holders[rank]), tuple(holders[list(layout.owner)].tolist())
    together = [other for other in range(layout.ranks) if holders[other] == holder]
    sides = Sides.of(mask, Layout(layout.length, layout.tile, layout.ranks // shares, owner))
    queries, keys = (_begins(side, layout, holders) for side in sides)
    rows = (sides.queries.owner() == holder).nonzero().squeeze(1)
    exchanges: dict[str, Any] = {}
    own = _own_heads(mask, heads)
    if method in ("ulysses", "ring_ulysses"):
        positions = torch.cat([layout.positions(other) for other in together])
        lengths = torch.tensor(layout.lengths)[together]
        to_heads = Traffic(torch.full_like(lengths, layout.lengths[rank]), lengths, positions)
        exchanges["to_heads"] = to_heads
        exchanges["to_tokens"] = to_heads.reversed(layout.positions(rank).repeat(shares))
    if method in ("ring", "ring_ulysses"):
        made, exchanges["ring"] = ring_steps(own, reads(mask, sides), sides, holder, rows, queries, keys)
    else:
        needs = torch.ones(sides.keys.layout.ranks, sides.keys.blocks, dtype=torch.bool)
        if method == "cast":
            needs = reads(mask, sides)
        columns = needs[holder].nonzero().squeeze(1)
        begins = keys[columns]
        if method != "ulysses":
            exchanges["cast"], begins = cast_keys(sides.keys, needs, rank)
        made = part(own, sides, rows, queries[rows], columns, begins)
    return PlannedMask(
        part=made,
        plan=torch.tensor([_number(method, mask, layout), secrets.randbits(56)]),
        positions=layout.positions(rank),
        mask_mod=mask.mask_mod,
        batch=mask.batch,
        heads=mask.heads,
        layout=layout,
        cp_group=everyone,
        heads_group=heads,
        ring_group=everyone if groups.ring is None or method != "ring_ulysses" else groups.ring,
        **exchanges,
    )


def _check_sizes(
    query: Tensor, key: Tensor, positions: Tensor, length: int, rank: int, batch: int, heads: int, shares: int
) -> None:
    local = positions.size(0)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.size(2) != local:
            raise errors.wrong_local_length(name, tensor.size(2), local, rank, length)
    for name, known, got in (("batches", batch, query.size(0)), ("heads", heads, query.size(1))):
        if known not in (1, got):
            raise errors.batch(name, known, got)
    if query.size(1) % shares:
        raise errors.heads_do_not_divide(query.size(1), shares)


def _number(method: str, mask: RunSchedule, layout: Layout) -> int:
    """The plan's number, the same on all ranks."""
    text = hashlib.sha256(f"{method} {layout.digest()}".encode())
    for table in mask.tensors:
        text.update(portable.bytes_of(table))
    text.update(portable.digest(mask.mask_mod, mask.tensors[0]))
    return int.from_bytes(text.digest()[:7], "big")


def _own_heads(mask: RunSchedule, group: CpGroup) -> RunSchedule:
    """The mask for the heads that a rank attends with."""
    if mask.heads == 1:
        return mask
    if mask.heads % group.size:
        raise errors.heads_do_not_divide(mask.heads, group.size)
    own = mask.heads // group.size
    return mask[:, group.rank * own : (group.rank + 1) * own]


def _begins(side: Side, layout: Layout, holders: Tensor) -> Tensor:
    """The row at which each block begins if ranks with the same holder have their tokens in one piece."""
    lengths = torch.tensor(layout.lengths)
    before = torch.ones(layout.ranks, layout.ranks, dtype=torch.bool).tril(-1)
    starts = ((holders[:, None] == holders) & before).long() @ lengths
    own = Side(layout, side.block)
    return starts[own.owner()] + own.places()


def _others(rows: Tensor, rank: int) -> int:
    """The sum over all ranks but this one."""
    return int(rows.sum() - rows[rank])


def _itself(result: Any) -> Any:
    return result


@run_while_traced
def _standing(group: str) -> tuple[int, int] | None:
    """The rank of this process in a group, and how many there are; None where it is not in that group."""
    try:
        found = process_group(group)
    except (KeyError, RuntimeError, ValueError, TypeError):
        return None
    return dist.get_rank(found), dist.get_world_size(found)


_TENSORS = ("plan", "positions", "to_heads", "to_tokens", "cast", "ring")


def _tensors_of(mask: PlannedMask) -> list[str]:
    return ["part", *(name for name in _TENSORS if getattr(mask, name) is not None)]


def _flatten(mask: PlannedMask) -> tuple[list[Any], Any]:
    names = _tensors_of(mask)[1:]
    constants = {f.name: getattr(mask, f.name) for f in dataclasses.fields(mask)}
    constants = {name: value for name, value in constants.items() if name not in ("part", *_TENSORS)}
    schedule = mask.part.schedule
    blocks, tables = schedule[:2], schedule.tables
    children = [tables, mask.part.tile_map, *(getattr(mask, name) for name in names)]
    return children, (blocks, tuple(names), tuple(constants.items()))


def _unflatten(children: Any, context: Any) -> PlannedMask:
    (tables, tile_map, *others), (blocks, names, constants) = children, context
    made = Part(BlockRuns.of(blocks, [tensor for table in tables for tensor in table]), tile_map)
    return PlannedMask(part=made, **dict(zip(names, others, strict=True)), **dict(constants))


pytree.register_pytree_node(
    PlannedMask, _flatten, _unflatten, serialized_type_name="flex_inductor.PlannedMask"
)
