"""Random score_mods, mask_mods, shapes, layouts and tilings against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from flex_inductor import create_block_mask
from flex_inductor.op import chunked
from tests.support import LAYOUTS, Sizes, attention_of, dense_of, judge

# An expression is a function of the lane and the captured tensors: (lane, captures) -> 0-d tensor.
Expression = Callable[["Lane", tuple], torch.Tensor]


class Lane(NamedTuple):
    score: torch.Tensor | None
    b: torch.Tensor
    h: torch.Tensor
    q_idx: torch.Tensor
    kv_idx: torch.Tensor


CAPTURE_SHAPES = ((), (5,), (7,), (3, 4))
INDEX_BINARY = (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum)
FLOAT_UNARY = (
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.neg,
    lambda x: x.clamp(-1, 1),
    lambda x: x * 0.5 + 1,
)
FLOAT_BINARY = (torch.add, torch.sub, torch.mul, torch.maximum)
COMPARISONS = (torch.ge, torch.lt, torch.eq, torch.ne)


def _indices() -> st.SearchStrategy[Expression]:
    leaves = st.sampled_from(Lane._fields[1:]).map(lambda name: lambda lane, captures: getattr(lane, name))

    def grown(inner):
        binary = st.builds(
            lambda op, a, b: lambda lane, captures: op(a(lane, captures), b(lane, captures)),
            st.sampled_from(INDEX_BINARY), inner, inner,
        )  # fmt: skip
        by_number = st.builds(
            lambda n, op, a: lambda lane, captures: op(a(lane, captures), n),
            st.integers(1, 4), st.sampled_from((torch.add, torch.sub, torch.floor_divide)), inner,
        )  # fmt: skip
        return binary | by_number

    return st.recursive(leaves, grown, max_leaves=3)


def _lookups(indices) -> st.SearchStrategy[Expression]:
    def lookup(number, *at):
        def expression(lane, captures):
            found = captures[number]
            for index, size in zip(at, CAPTURE_SHAPES[number], strict=False):
                found = found[index(lane, captures) % size]
            return found

        return expression

    return st.builds(lookup, st.integers(0, len(CAPTURE_SHAPES) - 1), indices, indices)


def _conditions(indices) -> st.SearchStrategy[Expression]:
    return st.builds(
        lambda op, a, b: lambda lane, captures: op(a(lane, captures), b(lane, captures)),
        st.sampled_from(COMPARISONS), indices, indices,
    )  # fmt: skip


def _floats(indices) -> st.SearchStrategy[Expression]:
    score = st.just(lambda lane, captures: lane.score)
    numbers = st.floats(-2, 2, width=16).map(lambda n: lambda lane, captures: lane.score * 0 + n)

    def grown(inner):
        unary = st.builds(
            lambda op, a: lambda lane, captures: op(a(lane, captures)), st.sampled_from(FLOAT_UNARY), inner
        )
        binary = st.builds(
            lambda op, a, b: lambda lane, captures: op(a(lane, captures), b(lane, captures)),
            st.sampled_from(FLOAT_BINARY), inner, inner,
        )  # fmt: skip
        choice = st.builds(
            lambda c, a, b: lambda lane, captures: torch.where(
                c(lane, captures), a(lane, captures), b(lane, captures)
            ),
            _conditions(indices), inner, inner,
        )  # fmt: skip
        return unary | binary | choice

    return st.recursive(score | _lookups(indices) | numbers, grown, max_leaves=6)


def _masks(indices) -> st.SearchStrategy[Expression]:
    def grown(inner):
        return st.builds(
            lambda op, a, b: lambda lane, captures: op(a(lane, captures), b(lane, captures)),
            st.sampled_from((torch.logical_and, torch.logical_or, torch.logical_xor)), inner, inner,
        )  # fmt: skip

    return st.recursive(_conditions(indices), grown, max_leaves=3)


@st.composite
def _sizes(draw) -> Sizes:
    kv_heads, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = st.integers(1, 23)
    return Sizes(
        batch, kv_heads * draw(st.integers(1, 3)), kv_heads, draw(length), draw(length),
        draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.sampled_from((1, batch))),
    )  # fmt: skip


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking runs for minutes; turn it on to look into a failure
    suppress_health_check=list(HealthCheck),
)
@given(
    score=_floats(_indices()),
    mask=st.none() | _masks(_indices()),
    sizes=_sizes(),
    layout=st.tuples(*(st.sampled_from(list(LAYOUTS)) for _ in range(3))),
    tiling=st.tuples(st.integers(1, 2000), st.integers(1, 24), st.integers(1, 24)),
    block=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    seed=st.integers(0, 100),
)
def test_random_mods(score, mask, sizes, layout, tiling, block, seed):
    captures = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + i))
        for i, shape in enumerate(CAPTURE_SHAPES)
    ]
    inputs = [LAYOUTS[name](t) for name, t in zip(layout, sizes.inputs(torch.float64, seed), strict=True)]

    def build(*captures):
        return lambda *lane: score(Lane(*lane), captures)

    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: mask(Lane(None, b, h, q_idx, kv_idx), ()),
            sizes.batch, sizes.heads, sizes.queries, sizes.keys, device="cpu", BLOCK_SIZE=block,
        )  # fmt: skip
    event("masked" if block_mask is not None else "not masked")
    usual = chunked.CHUNK_ELEMENTS, chunked.MAX_CHUNK_QUERIES, chunked.MAX_CHUNK_KEYS
    chunked.CHUNK_ELEMENTS, chunked.MAX_CHUNK_QUERIES, chunked.MAX_CHUNK_KEYS = tiling
    try:
        judge(attention_of(build), dense_of(build), inputs, captures, block_mask)
    finally:
        chunked.CHUNK_ELEMENTS, chunked.MAX_CHUNK_QUERIES, chunked.MAX_CHUNK_KEYS = usual
