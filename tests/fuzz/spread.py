"""Random calls of which each rank of a group has a part, as one process has them."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flex_inductor.distributed.context import context_parallel
from tests.bounds import rounding
from tests.distributed.cases import together
from tests.distributed.group import groups
from tests.support import judge

from . import plain
from .mods import score_mod_of

RANKS = 2
BALANCES = ("contiguous", "head_tail", "work", "auto")
METHODS = ("auto", "cast", "all_gather", "ulysses", "ring")


class Program(NamedTuple):
    call: plain.Program = plain.Program(kv_heads=2)
    method: str = "auto"
    balance: str = "auto"


@st.composite
def programs(draw, route: str) -> Program:
    call = draw(plain.programs(route))
    kv_heads = RANKS  # Ulysses shares heads out
    call = call._replace(
        heads=kv_heads * call.heads // call.kv_heads, kv_heads=kv_heads, one_kv_batch=False, door=""
    )
    call = call._replace(block=draw(st.sampled_from([16, 32, (16, 64), (64, 16)])))
    return Program(call, draw(st.sampled_from(METHODS)), draw(st.sampled_from(BALANCES)))


def several_values(route: str, most: int) -> st.SearchStrategy[list[plain.Values]]:
    return plain.several_values(route, most).map(
        lambda several: [v._replace(queries=v.keys + 60, keys=v.keys + 60) for v in several]
    )


class Told(NamedTuple):
    """What each rank is told, as plain data."""

    program: Program
    values: plain.Values


@functools.cache
def _group() -> Any:
    started = ExitStack()
    atexit.register(started.close)
    return started.enter_context(groups())


def on_rank(
    group: Any, told: Told, tensors: list[Tensor], grads: tuple[Tensor, Tensor] | None
) -> dict[str, Any]:
    """What one rank has of the results, or of the gradients."""
    program, values = told.program.call, told.values
    sizes = plain.sizes_of(program, values)
    cp = context_parallel(group, told.program.method, told.program.balance)
    _, mask = plain.captures_and_mask(program, values, sizes)
    block = program.block if isinstance(program.block, int) else program.block[0]
    planned = cp.plan(mask, values.keys, block=block)
    rows = [t.requires_grad_() for t in cp.shard(tensors[:3], 2)]
    captures = [t.requires_grad_(t.is_floating_point()) for t in tensors[3:]]
    attend = plain.ours(program, score_mod_of(program.score))
    results = attend(values.scale, values.shift, *rows, captures, planned)
    found = {"positions": cp.layout.positions(cp.rank)}
    if grads is None:
        return found | {
            name: t.detach() for name, t in zip(("out", "lse", "max_scores"), results, strict=True)
        }
    wanted = [*rows, *(t for t in captures if t.requires_grad)]
    got = torch.autograd.grad(results[:2], wanted, cp.shard(list(grads), 2), allow_unused=True)
    got = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, got, strict=True)]
    return found | dict(zip("qkv", got, strict=False)) | {"captures": got[3:]}


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, told, roundings, *tensors):
        ctx.told, ctx.roundings = told, roundings
        ctx.save_for_backward(*tensors)
        found = together(_group().run(on_rank, told, [t.detach() for t in tensors], None, ranks=RANKS))
        ctx.mark_non_differentiable(found["max_scores"])
        return found["out"], found["lse"], found["max_scores"]

    @staticmethod
    def backward(ctx, *grads):
        tensors = [t.detach() for t in ctx.saved_tensors]
        parts = _group().run(on_rank, ctx.told, tensors, grads[:2], ranks=RANKS)
        of_ranks = zip(*(part.pop("captures") for part in parts), strict=True)
        rows = together(parts)
        captured: list[Tensor | None] = []
        for i, capture in enumerate(tensors[3:]):
            if not capture.is_floating_point():
                captured.append(None)
                continue
            of_rank = [part.double() for part in next(of_ranks)]
            captured.append(sum(of_rank, torch.zeros(())).to(capture.dtype))
            ctx.roundings[f"d_captures[{i}]"] = sum(rounding(part, capture.dtype) for part in of_rank)
        return None, None, *(rows[name] for name in "qkv"), *captured


def check(route: str, program: Program, several: list[plain.Values]) -> None:
    """Judge the calls of one program."""
    call = program.call
    for values in several:
        sizes = plain.sizes_of(call, values)
        captures, mask = plain.captures_and_mask(call, values, sizes)

        roundings: dict[str, Tensor] = {}  # each rank rounds its part of a captured gradient

        def attend(query, key, value, captures, _, values=values, roundings=roundings):
            return _Spread.apply(Told(program, values), roundings, query, key, value, *captures)

        judge(
            attend,
            plain.dense(call, score_mod_of(call.score)(values.shift), values.scale),
            plain.inputs_of(call, values, sizes),
            captures,
            mask,
            by_ratio=False,
            roundings=roundings,
        )
