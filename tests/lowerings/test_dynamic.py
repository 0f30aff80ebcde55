"""What may change from call to call without compiling again."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.reference import reference

CALLS = 4


def tensors(length=24, batch=2):
    return [torch.randn(batch, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def distance(attend, q, k, v):
    return attend(q, k, v, lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.1)


def table(attend, q, k, v, t):
    return attend(q, k, v, lambda s, b, h, q_idx, kv_idx: s + t[(q_idx - kv_idx).clamp(0, t.size(0) - 1)])


def masked(attend, q, k, v, mask):
    return attend(q, k, v, block_mask=mask)


def numbers(attend, q, k, v, window, factor):
    return attend(q, k, v, lambda s, b, h, q_idx, kv_idx: torch.where(q_idx - kv_idx < window, s * factor, s))


def partial(attend, q, k, v, factor):
    return attend(q, k, v, functools.partial(lambda s, *_, factor: s * factor, factor=factor))


def scaled(attend, q, k, v, scale):
    return attend(q, k, v, scale=scale)


# name -> (function, arguments of the i-th call)
CASES = {
    "length": (distance, lambda i: tensors(24 + 5 * i)),
    "batch and captured size": (
        table,
        lambda i: [*tensors(24, 2 + i), torch.randn(7 + i, dtype=torch.float64, requires_grad=True)],
    ),
    "block mask": (
        masked,
        lambda i: [
            *tensors(40 + 16 * i),
            create_block_mask(causal, None, None, 40 + 16 * i, 40 + 16 * i, device="cpu", BLOCK_SIZE=16),
        ],
    ),
    "numbers": (numbers, lambda i: [*tensors(), 3 + i, 0.5 + i]),
    "number in a partial": (partial, lambda i: [*tensors(), 0.5 + i]),
    "scale": (scaled, lambda i: [*tensors(), 0.25 * (i + 1)]),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_compiles_at_most_twice(name, dynamic):
    function, arguments = CASES[name]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        functools.partial(function, flex_attention), backend="flex_inductor", fullgraph=True, dynamic=dynamic
    )
    graphs = []
    for i in range(CALLS):
        args = arguments(i)
        leaves = [a for a in args if isinstance(a, torch.Tensor)]
        out = compiled(*args)
        gold = function(lambda *a, **kw: reference(*a, **kw)[0], *args)
        torch.testing.assert_close(out, gold)
        torch.testing.assert_close(
            torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(gold.sin().sum(), leaves)
        )
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 2, graphs
