"""Ring attention: blocks of keys and values go from rank to rank, while each attends to the one that it has.

A block travels only as far as some rank reads it, and the next one travels during the computation. Partial results are
in fp32. In the backward the gradient of a block travels with it, and from the last rank back to its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import upward
from ..mod_ir import serialise
from ..mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES, score_dtype
from ..mod_ir.checks import mark_checked
from ..mod_ir.trace import trace_value
from ..op import AttentionCall, BackwardCall, attention, attention_backward, call_text, chunked
from ..op.call import QKV, tensors_of, wanted_gradients
from ..op.layout import empty_like_layout
from ..op.ring import Ring
from ..op.schedule import BlockRuns
from ..op.tile_map import TileMap
from ..options import loaded_options, saved_options
from .exchange import agree, named, process_group
from .masks import inputs
from .plan import Part

Outputs = tuple[Tensor, Tensor, Tensor]


class _Way:
    """The way of the blocks through this rank."""

    def __init__(self, ring: Ring, key: Tensor, value: Tensor):
        # Nothing here holds a block: they take all the memory.
        self.batch, self.heads, self.width = *key.shape[:2], key.size(-1) + value.size(-1)
        self.device = key.device
        self.name, self.group = ring.group, process_group(ring.group)
        self.rank, self.ranks = ring.rank, ring.lengths.numel()
        self.lengths, self.far, self.visits = ring.lengths.tolist(), ring.far.tolist(), ring.visits.tolist()

    def owner(self, step: int) -> int:
        return (self.rank - step) % self.ranks

    def goes_on(self, step: int) -> bool:
        """Whether the block that is here at this step is sent to the next rank."""
        return self.far[self.owner(step)] > step

    def is_here(self, step: int) -> bool:
        return self.far[self.owner(step)] >= step

    def send(self, tensor: Tensor, to: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to % self.ranks)

    def receive(self, tensor: Tensor, sender: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=sender % self.ranks)

    def block(self, step: int, dtype: torch.dtype) -> Tensor:
        """Unfilled, for the block that is here at this step."""
        shape = (self.batch, self.heads, self.lengths[self.owner(step)], self.width)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def begin(self, messages: list[dist.P2POp]) -> list[Any]:
        with named(self.name):
            return dist.batch_isend_irecv(messages) if messages else []

    def end(self, works: list[Any]) -> None:
        with named(self.name):
            for work in works:
                work.wait()

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """What is here at each step; the next one comes meanwhile."""
        held: Tensor | None = torch.cat([key, value], -1)
        for step in range(self.ranks):
            messages, coming = [], None
            if held is not None and self.goes_on(step):
                messages.append(self.send(held, self.rank + 1))
            if step + 1 < self.ranks and self.is_here(step + 1):
                coming = self.block(step + 1, key.dtype)
                messages.append(self.receive(coming, self.rank - 1))
            works = self.begin(messages)
            yield step, held
            self.end(works)
            held = coming


def _step(call: Any, block: Tensor, step: int) -> Any:
    """The call on the keys and values that are here at this step."""
    schedule: BlockRuns = call.inputs.schedule
    ranks, tables = call.inputs.ring.lengths.numel(), schedule[2:]
    grids = schedule.kv_offsets.size(0) // ranks
    columns = schedule.q_offsets.size(-1) - 1
    at = [table[step * grids : (step + 1) * grids] if table.dim() == 3 else table for table in tables]
    lines = call.inputs.tile_map
    part = Part(
        BlockRuns(*schedule[:2], *at),
        TileMap(lines.queries, lines.keys[step * columns : (step + 1) * columns]),
    )
    width = block.size(-1) - call.value.size(-1)
    here = inputs(part, call.query.size(0))
    partial = call.query.dtype != score_dtype(call.query.dtype)
    kept = call.inputs._replace(schedule=here.schedule, tile_map=here.tile_map, ring=None, partial=partial)
    return call._replace(key=block[..., :width], value=block[..., width:], inputs=kept)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None else one + other


def forward(call: AttentionCall, attend: Callable[[AttentionCall], Outputs] | None = None) -> Outputs:
    attend = attend or (lambda step: attention(*step))
    ring = call.inputs.ring
    shape = (*call.key.shape[:2], call.key.size(-1), *call.value.shape[3:])
    agree(ring.plan, shape, call.query.dtype, ring.group)
    way = _Way(ring, call.key, call.value)
    dtype = score_dtype(call.query.dtype)
    rows = call.query.shape[:3]
    out = call.query.new_zeros((*rows, call.value.size(-1)), dtype=dtype)
    lse, peak = (call.query.new_full(rows, -math.inf, dtype=dtype) for _ in range(2))
    for step, block in way.blocks(call.key, call.value):
        if block is None or not way.visits[step]:
            block = None  # before the next one comes, as below
            continue
        part, part_lse, part_peak = attend(_step(call, block, step))
        new_lse = torch.logaddexp(lse, part_lse)
        base = torch.where(new_lse == -math.inf, 0.0, new_lse)
        out.mul_((lse - base).exp_().unsqueeze(-1)).add_(part * (part_lse - base).exp_().unsqueeze(-1))
        lse, peak = new_lse, torch.maximum(peak, part_peak)
        block = part = None
    return empty_like_layout(call.query, out.shape).copy_(out), lse, peak


def backward(call: BackwardCall, attend: Callable[[BackwardCall], Any] | None = None) -> Any:
    attend = attend or (lambda step: attention_backward(*step))
    way = _Way(call.inputs.ring, call.key, call.value)
    dtype = score_dtype(call.query.dtype)
    d_query = torch.zeros_like(call.query, dtype=dtype)
    d_captures: list[Tensor | None] | None = None
    works: list[Any] = []
    summed: Tensor | None = None  # the gradient of the block that comes next, from the ranks before this one
    for step, block in way.blocks(call.key, call.value):
        grads: Any = None
        if block is not None and way.visits[step]:
            grads = attend(_step(call, block, step))
        way.end(works)
        total = torch.zeros_like(block, dtype=dtype) if summed is None and block is not None else summed
        if grads is not None:
            d_query_part, d_key, d_value, captured = grads
            if d_query_part is not None:
                d_query += d_query_part
            width = block.size(-1) - call.value.size(-1)
            for grad, at in ((d_key, total[..., :width]), (d_value, total[..., width:])):
                if grad is not None:
                    at += grad
            d_captures = [*captured] if d_captures is None else [*map(_added, d_captures, captured)]
            grads = grad = d_query_part = d_key = d_value = None
        block = None
        messages, summed = [], None
        if total is not None and way.goes_on(step):
            messages.append(way.send(total, way.rank + 1))
        elif total is not None and step:
            messages.append(way.send(total, way.owner(step)))
        elif total is not None:
            home = total
        if step + 1 < way.ranks and way.is_here(step + 1):
            summed = way.block(step + 1, dtype)
            messages.append(way.receive(summed, way.rank - 1))
        if step and step == way.far[way.rank]:
            home = way.block(0, dtype)
            messages.append(way.receive(home, way.rank + step))
        works = way.begin(messages)
    way.end(works)
    d_key, d_value = home.split([call.key.size(-1), call.value.size(-1)], -1)
    found = [
        empty_like_layout(like, like.shape).copy_(grad) if name in call.wants else None
        for name, like, grad in (
            ("query", call.query, d_query),
            ("key", call.key, d_key),
            ("value", call.value, d_value),
        )
    ]
    if d_captures is None:  # no query here visits any key
        wanted = wanted_gradients(call.joint, len(call.inputs.score_captures))
        d_captures = [
            torch.zeros_like(capture) if want else None
            for capture, want in zip(call.inputs.score_captures, wanted, strict=True)
        ]
    return found[0], found[1], found[2], tuple(d_captures)


# In compiled code the call is one op, whose mods come as text; each step runs a kernel of its class.

_library = torch.library.Library("flex_inductor", "FRAGMENT")
_library.define(
    "ring_forward(Tensor query, Tensor key, Tensor value, Tensor[] tensors, str call) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(
    "ring_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_out, "
    "Tensor? grad_lse, Tensor[] tensors, str call) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_GRAPHS = {"score_mod": SCORE_LANES, "mask_mod": MASK_LANES, "joint": JOINT_LANES}


def dump(call: Any) -> tuple[str, list[Any]]:
    """What the ops take beside query, key and value. The mods are FX graphs."""
    data, tensors = call_text.inputs_data(call.inputs)
    graphs = {name: getattr(call, name, None) for name in _GRAPHS}
    text = serialise.dump(
        {
            "inputs": data,
            "scale": float(call.scale),
            "options": saved_options(call.options),
            "wants": list(getattr(call, "wants", ())),
            "graphs": {name: graph and serialise.graph_data(graph) for name, graph in graphs.items()},
        }
    )
    return text, tensors


@functools.lru_cache(maxsize=256)
def _read(text: str) -> tuple[Any, float, Any, tuple[str, ...], dict[str, Any]]:
    names = ("inputs", "scale", "options", "wants", "graphs")
    data, scale, options, wants, graphs = serialise.fields(serialise.load(text), *names)
    functions = {name: graph and serialise.graph_function(graph) for name, graph in graphs.items()}
    return data, scale, loaded_options(options), tuple(wants), functions


_traced: dict[Any, Any] = {}  # graphs of calls, by text and what captures are like


def _load(text: str, tensors: list[Tensor], query: Tensor) -> dict[str, Any]:
    data, scale, options, wants, functions = _read(text)
    found = call_text.inputs_from(data, tensors)
    key = (text, query.dtype, query.device, *((t.dtype, t.shape) for t in tensors))
    if key not in _traced:
        while len(_traced) >= 256:
            del _traced[next(iter(_traced))]
        _traced[key] = {
            name: function
            and mark_checked(
                trace_value(
                    function,
                    _GRAPHS[name],
                    query,
                    found.mask_captures if name == "mask_mod" else found.score_captures,
                )
            )
            for name, function in functions.items()
        }
    return {**_traced[key], "inputs": found, "scale": scale, "options": options, "wants": wants}


def _compiled(call: Any) -> Any:
    return upward.compiled(call)(tensors_of(call))


@torch.library.impl(_library, "ring_forward", "CompositeExplicitAutograd")
@torch.no_grad()
def _ring_forward(query, key, value, tensors, call):
    read = _load(call, tensors, query)
    fields = {name: read[name] for name in AttentionCall._fields[3:]}
    return forward(AttentionCall(query, key, value, **fields), _compiled)


@torch.library.register_fake("flex_inductor::ring_forward", lib=_library)
def _ring_forward_fake(query, key, value, *_):
    return chunked.empty_outputs(query, value)


@torch.library.impl(_library, "ring_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _ring_backward(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    read = _load(call, tensors, query)
    fields = {name: read[name] for name in BackwardCall._fields[7:]}
    *grads, captured = backward(
        BackwardCall(query, key, value, out, lse, grad_out, grad_lse, **fields), _compiled
    )
    return [grad for grad in (*grads, *captured) if grad is not None]


@torch.library.register_fake("flex_inductor::ring_backward", lib=_library)
def _ring_backward_fake(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    data, _, _, wants, functions = _read(call)
    named = zip(QKV, (query, key, value), strict=True)
    grads = [empty_like_layout(tensor, tensor.shape) for name, tensor in named if name in wants]
    captures = call_text.inputs_from(data, tensors).score_captures
    joint = functions["joint"]
    wanted = joint.output[1:] if joint else [None] * len(captures)
    return grads + [
        torch.empty(c.shape, dtype=c.dtype, device=c.device)
        for c, want in zip(captures, wanted, strict=True)
        if want is not None
    ]
