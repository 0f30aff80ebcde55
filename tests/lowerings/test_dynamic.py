"""What may change from call to call without compiling again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters

from flex_inductor import create_block_mask
from tests.support import Sizes, attention_of, causal, dense_of, judge, served_by

CALLS = 4
SIZES = Sizes(batch=2, heads=2, kv_heads=2, queries=24, keys=24, head_dim=8, value_dim=8)


def longer(i, step=5):
    return SIZES._replace(queries=24 + step * i, keys=24 + step * i)


def block_mask(i):
    length = longer(i, 16).keys
    return create_block_mask(causal, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def no_captures(i):
    return ()


def table_of(i):
    return (torch.randn(7 + i, dtype=torch.float64),)


class Case(NamedTuple):
    """`attend(of, *numbers, ...)` is attention where `of` is attention_of, and dense where it is dense_of."""

    attend: Callable
    numbers: Callable = no_captures
    sizes: Callable = lambda i: SIZES
    captures: Callable = no_captures
    mask: Callable = lambda i: None


def distance(of, *call):
    return of(lambda: lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.1)(*call)


def table(of, *call):
    def build(t):
        return lambda s, b, h, q_idx, kv_idx: s + t[(q_idx - kv_idx).clamp(0, t.size(0) - 1)]

    return of(build)(*call)


def masked(of, *call):
    return of(None)(*call)


def numbers(of, window, factor, *call):
    def mod(s, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < window, s * factor, s)

    return of(lambda: mod)(*call)


def partial(of, factor, *call):
    return of(lambda: functools.partial(lambda s, *_, factor: s * factor, factor=factor))(*call)


def scaled(of, scale, *call):
    return of(None, scale)(*call)


def all_numbers(of, window, factor, scale, *call):
    def mod(s, b, h, q_idx, kv_idx, factor):
        return torch.where(q_idx - kv_idx < window, s * factor, s)

    return of(lambda: functools.partial(mod, factor=factor), scale)(*call)


CASES = {
    "length": Case(distance, sizes=longer),
    "batch and captured size": Case(table, sizes=lambda i: SIZES._replace(batch=2 + i), captures=table_of),
    "block mask": Case(masked, sizes=lambda i: longer(i, 16), mask=block_mask),
    "numbers": Case(numbers, lambda i: (3 + i, 0.5 + i)),
    "number in a partial": Case(partial, lambda i: (0.5 + i,)),
    "scale": Case(scaled, lambda i: (0.25 * (i + 1),)),
}
TOGETHER = {
    "sizes": Case(
        table,
        sizes=lambda i: longer(i, 16)._replace(batch=2 + i),
        captures=table_of,
        mask=block_mask,
    ),
    "numbers": Case(all_numbers, lambda i: (3 + i, 0.5 + i, 0.25 * (i + 1))),
}


def assert_compiles_at_most_twice(case, route, dtype, dynamic):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        functools.partial(case.attend, attention_of), backend="flex_inductor", fullgraph=True, dynamic=dynamic
    )
    graphs = []
    with served_by(route):
        for i in range(CALLS):
            changing = case.numbers(i)
            judge(
                functools.partial(compiled, *changing),
                functools.partial(case.attend, dense_of, *changing),
                case.sizes(i).inputs(dtype),
                case.captures(i),
                case.mask(i),
            )
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 2, graphs


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_chunks(name, dynamic):
    assert_compiles_at_most_twice(CASES[name], "chunked", torch.float64, dynamic)


@pytest.mark.parametrize("name", TOGETHER)
def test_fused(name):
    assert_compiles_at_most_twice(TOGETHER[name], "cpu", torch.float32, dynamic=True)
