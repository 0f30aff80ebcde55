"""Ring attention: keys and values go from rank to rank, while each attends to those that it has.

The keys of a rank travel as two blocks, its halves, only as far as some rank reads them. The next blocks travel during
the computation. Partial results are in fp32. In the backward the gradient of a block follows it, and goes from the last
rank back to its owner. One half's gradient travels while the other's is computed, so no more than one block of each
kind is held.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .. import upward
from ..kept import Kept
from ..mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES, score_dtype
from ..mod_ir.checks import mark_checked
from ..mod_ir.errors import bad_mod_text
from ..mod_ir.trace import trace_value
from ..op import AttentionCall, BackwardCall, Inputs, attention, attention_backward, call_text
from ..op.call import wanted_gradients
from ..op.call_text import Graphs
from ..op.eager import chunked, chunked_ops
from ..op.layout import empty_like_layout
from ..op.library import BACKWARD, FORWARD, define
from ..op.ring import HALVES, Ring, computed_by
from ..softmax import entropy_of_both, entropy_with_sinks, shares, with_sinks
from ..visits import BlockRuns
from ..visits.places import TileMap
from .exchange import agree, named, process_group
from .plan import Part, inputs, lines_of_batches

Outputs = tuple[Tensor, ...]
Block: TypeAlias = list[Tensor]  # keys and values, or their gradients


class _Way:
    """How the blocks go through this rank."""

    def __init__(self, ring: Ring, key: Tensor, value: Tensor):
        # Holds no block: they take most of the memory.
        self.batch, self.heads, self.widths = *key.shape[:2], (key.size(-1), value.size(-1))
        self.device = key.device
        self.name, self.group = ring.group, process_group(ring.group)
        self.rank, self.ranks = ring.rank, ring.hops.numel()
        self.lengths, self.reach, self.visits = (
            ring.lengths.tolist(),
            ring.hops.tolist(),
            ring.visits.tolist(),
        )

    def hops(self, step: int) -> int:
        """How many ranks the block of this step has travelled."""
        return step // HALVES

    def owner(self, step: int) -> int:
        return (self.rank - self.hops(step)) % self.ranks

    def goes_on(self, step: int) -> bool:
        """Whether the block that is here at this step is sent to the next rank."""
        return self.reach[self.owner(step)] > self.hops(step)

    def is_here(self, step: int) -> bool:
        return step < len(self.visits) and self.reach[self.owner(step)] >= self.hops(step)

    def send(self, block: Block, to: int) -> list[dist.P2POp]:
        return self._messages(dist.isend, block, to)

    def receive(self, block: Block, sender: int) -> list[dist.P2POp]:
        return self._messages(dist.irecv, block, sender)

    def _messages(self, what: Any, block: Block, other: int) -> list[dist.P2POp]:
        return [
            dist.P2POp(what, part, group=self.group, group_peer=other % self.ranks)
            for part in block
            if part.numel()
        ]

    def block(self, step: int, dtype: torch.dtype) -> Block:
        """Unfilled, for the block that is here at this step."""
        rows = self.lengths[self.owner(step)][step % HALVES]
        shape = (self.batch, self.heads, rows)
        return [torch.empty((*shape, width), dtype=dtype, device=self.device) for width in self.widths]

    def begin(self, messages: list[dist.P2POp]) -> list[Any]:
        with named(self.name):
            return dist.batch_isend_irecv(messages) if messages else []

    def end(self, works: list[Any]) -> None:
        with named(self.name):
            for work in works:
                work.wait()
        works.clear()  # they hold what was sent

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Block | None]]:
        """Yields the block of each step, while that of HALVES steps later arrives."""
        halves = (tensor.split(self.lengths[self.rank], 2) for tensor in (key, value))
        here: deque[Any] = deque(zip(*halves, strict=True))
        for step in range(len(self.visits)):
            held, coming = here.popleft(), None
            messages = []
            if held is not None:
                held = [part.contiguous() for part in held]
                if self.goes_on(step):
                    messages += self.send(held, self.rank + 1)
            if self.is_here(step + HALVES):
                coming = self.block(step + HALVES, key.dtype)
                messages += self.receive(coming, self.rank - 1)
            here.append(coming)
            works = self.begin(messages)
            yield step, held
            self.end(works)


def ring_inputs(part: Part, ring: Ring, head: Any) -> Inputs:
    """The call around a ring. Mods see `head` as its first head."""
    queries, keys = part.tile_map
    tile_map = TileMap(lines_of_batches(queries, 1, head), keys)
    return Inputs(schedule=part.schedule, tile_map=tile_map, ring=ring)


def _step(call: Any, block: Block, step: int) -> Any:
    """The call on the keys and values that are here at this step."""
    schedule: BlockRuns = call.inputs.schedule
    lines: TileMap = call.inputs.tile_map
    steps = call.inputs.ring.visits.numel()
    grids, columns = schedule.kv_offsets.size(0) // steps, lines.keys.size(0) // steps
    at = [(table.offsets[step * grids : (step + 1) * grids], table.runs) for table in schedule.tables]
    part = Part(
        schedule.with_tables(at),
        TileMap(lines.queries, lines.keys[step * columns : (step + 1) * columns]),
    )
    here = inputs(part, call.query.size(0))
    partial = call.query.dtype != score_dtype(call.query.dtype)
    kept = call.inputs._replace(
        schedule=here.schedule, tile_map=here.tile_map, ring=None, partial=partial, sinks=None
    )
    return call._replace(key=block[0], value=block[1], inputs=kept)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _total(total: Block | None, grads: Any, block: Block, dtype: torch.dtype) -> Block:
    """The gradients of a block, added to the parts of other ranks."""
    if total is None:
        return [
            torch.zeros_like(part, dtype=dtype) if grad is None else grad.contiguous()
            for part, grad in zip(block, grads, strict=True)
        ]
    for at, grad in zip(total, grads, strict=True):
        if grad is not None:
            at += grad
    return total


def forward(
    ring: Ring, call: AttentionCall, attend: Callable[[AttentionCall], Outputs] | None = None
) -> Outputs:
    attend = attend or (lambda step: attention(*step))
    shape = (*call.key.shape[:2], call.key.size(-1), *call.value.shape[3:])
    agree(ring.plan, shape, call.query.dtype, ring.group)
    way = _Way(ring, call.key, call.value)
    merged: Outputs | None = None
    part: Outputs | None
    for step, block in way.blocks(call.key, call.value):
        if block is not None and way.visits[step]:
            part = attend(_step(call, block, step))
            merged = part if merged is None else _merged(merged, part, call.options.more)
        block = part = None  # before further ones come
    more = call.options.more
    if merged is None:  # no query here visits any key
        merged = chunked.empty_outputs(call.query, call.value, more=more)
        for name, result in zip(("out", "lse", "max_scores", *more), merged, strict=True):
            result.fill_(chunked.NOTHING[name])
    out, lse, *rest = merged
    if call.inputs.sinks is not None:  # once for all ranks
        without = lse
        out, lse = with_sinks(out, without, call.inputs.sinks)
        rest[1:] = [
            entropy_with_sinks(rows, without, call.inputs.sinks) if name == "entropy" else rows
            for name, rows in zip(more, rest[1:], strict=True)
        ]
    return empty_like_layout(call.query, out.shape).copy_(out), lse, *rest


def _merged(one: Outputs, other: Outputs, more: Sequence[str]) -> Outputs:
    """Attention to the keys of both; changes the output of the first."""
    (out, lse, peak, *rows), (part, part_lse, part_peak, *part_rows) = one, other
    total = torch.logaddexp(lse, part_lse)
    weight, part_weight = shares(lse, part_lse)
    further = {
        "entropy": lambda row, of_part: entropy_of_both(row, of_part, weight, part_weight),
        "max_indices": lambda row, of_part: torch.where(
            (part_peak > peak) | ((part_peak == peak) & (of_part < row)), of_part, row
        ),
    }
    return (
        out.mul_(weight.unsqueeze(-1)).addcmul_(part, part_weight.unsqueeze(-1)),
        total,
        torch.maximum(peak, part_peak),
        *(further[name](row, of_part) for name, row, of_part in zip(more, rows, part_rows, strict=True)),
    )


def backward(ring: Ring, call: BackwardCall, attend: Callable[[BackwardCall], Any] | None = None) -> Any:
    attend = attend or (lambda step: attention_backward(*step))
    way = _Way(ring, call.key, call.value)
    dtype = score_dtype(call.query.dtype)
    d_query: Tensor | None = None
    d_captures: list[Tensor | None] | None = None
    works: list[Any] = []
    # The gradients of the blocks of this step and the next, from the ranks before this one; those of this rank's own.
    coming: deque[Block | None] = deque([None] * HALVES)
    own_grads: list[Block] = []
    for step, block in way.blocks(call.key, call.value):
        grads: Any = attend(_step(call, block, step)) if block is not None and way.visits[step] else None
        way.end(works)
        messages: list[dist.P2POp] = []
        total, arriving = coming.popleft(), None
        if block is not None:
            total = _total(total, grads[1:3] if grads else (None, None), block, dtype)
        if grads is not None:
            d_query_part, _, _, captured = grads
            if d_query is None:
                d_query = d_query_part
            else:
                d_query += d_query_part
            d_captures = [*captured] if d_captures is None else [*map(_added, d_captures, captured)]
        block = grads = d_query_part = None  # before further ones come
        if total is not None and way.goes_on(step):
            messages += way.send(total, way.rank + 1)
        elif total is not None and way.hops(step):
            messages += way.send(total, way.owner(step))
        elif total is not None:
            own_grads.append(total)
        if way.is_here(step + HALVES):
            arriving = way.block(step + HALVES, dtype)
            messages += way.receive(arriving, way.rank - 1)
        coming.append(arriving)
        if 0 < way.hops(step) == way.reach[way.rank]:
            own_grads.append(way.block(step % HALVES, dtype))
            messages += way.receive(own_grads[-1], way.rank + way.hops(step))
        works = way.begin(messages)
    way.end(works)
    d_keys, d_values = zip(*own_grads, strict=True)
    found = [
        _joined(like, parts) if name in call.wants else None
        for name, like, parts in (
            ("query", call.query, (torch.zeros_like(call.query) if d_query is None else d_query,)),
            ("key", call.key, d_keys),
            ("value", call.value, d_values),
        )
    ]
    if d_captures is None:  # no query here visits any key
        wanted = wanted_gradients(call.joint, len(call.inputs.score_captures))
        d_captures = [
            torch.zeros_like(capture) if want else None
            for capture, want in zip(call.inputs.score_captures, wanted, strict=True)
        ]
    return found[0], found[1], found[2], tuple(d_captures)


computed_by.update(forward=forward, backward=backward)


def _joined(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """One after the other, in the dtype and layout of `like`."""
    whole = empty_like_layout(like, like.shape)
    for at, part in zip(whole.split([part.size(2) for part in parts], 2), parts, strict=True):
        at.copy_(part)
    return whole


# In compiled code the call is one op that takes mods as text. Each step runs a kernel of its class.

_LANES = (SCORE_LANES, MASK_LANES, JOINT_LANES)


def dump(call: Any) -> tuple[str, list[Any]]:
    """What the ops take beside query, key and value. The mods are FX graphs."""
    graphs = Graphs(call.score_mod, call.mask_mod, call.joint)
    return call_text.dump(call.inputs, graphs, float(call.scale), call.wants, call.options)


_traced: Kept[Graphs] = Kept(256)  # graphs of calls, by text and what captures are like


def _load(text: str, tensors: list[Tensor], query: Tensor) -> tuple[Ring, Graphs, call_text.Call[Graphs]]:
    """A call, its ring, and the graphs of its mods."""
    call = call_text.load(text, tensors, Graphs)
    if call.inputs.ring is None:
        raise bad_mod_text("it has no ring")

    def traced() -> Graphs:
        score, mask = call.inputs.score_captures, call.inputs.mask_captures
        return Graphs(
            *(
                function and mark_checked(trace_value(function, lanes, query, captures))
                for function, lanes, captures in zip(call.mods, _LANES, (score, mask, score), strict=True)
            )
        )

    key = (text, query.dtype, query.device, *((t.dtype, t.shape) for t in tensors))
    return call.inputs.ring, _traced.once(key, traced), call


def _compiled(call: Any) -> Any:
    return upward.compiled(call)()


@torch.no_grad()
def _ring_forward(query, key, value, tensors, call):
    ring, (score, mask, _), read = _load(call, tensors, query)
    whole = AttentionCall(query, key, value, score, mask, read.scale, read.inputs, read.options)
    return [*forward(ring, whole, _compiled)]


def _ring_forward_fake(query, key, value, tensors, call):
    more = call_text.load(call, tensors, Graphs).options.more
    return [*chunked.empty_outputs(query, value, more=more)]


@torch.no_grad()
def _ring_backward(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    ring, (score, mask, joint), read = _load(call, tensors, query)
    whole = BackwardCall(
        query, key, value, out, lse, grad_out, grad_lse,
        score, joint, mask, read.scale, read.wants, read.inputs, read.options,
    )  # fmt: skip
    *grads, captured = backward(ring, whole, _compiled)
    return [grad for grad in (*grads, *captured) if grad is not None]


define("ring_forward", FORWARD, _ring_forward, _ring_forward_fake)
define("ring_backward", BACKWARD, _ring_backward, functools.partial(chunked_ops.backward_fake, Graphs))
