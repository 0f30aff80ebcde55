"""Tables that a mod makes itself, of positions or of one number, are read like captured ones."""

from __future__ import annotations

import pytest
import torch

from flex_inductor import decisions, flex_attention
from flex_inductor.tools.inspector import attention_kernels
from tests.support import Sizes, attention_of, dense_of, judge

LENGTH = 48
SIZES = Sizes(1, 2, 1, LENGTH, LENGTH)


def biased():
    def score_mod(score, b, h, q_idx, kv_idx):
        places = torch.arange(3, 3 + 2 * LENGTH, 2)
        far = (places.flip(0)[q_idx] - torch.arange(LENGTH)[kv_idx] // 5) * 0.02
        filled = torch.full((2, LENGTH), 0.5)[h, q_idx] * torch.zeros(2)[h]
        return score + far + filled + torch.eye(LENGTH)[q_idx, kv_idx] * torch.ones(LENGTH)[kv_idx]

    return score_mod


@pytest.mark.parametrize("route", [None, "cpu"])
def test_values(route):
    torch._dynamo.reset()
    attend = attention_of(biased)
    if route:
        attend = torch.compile(attend, backend="flex_inductor", fullgraph=True, options={"route": route})
    decisions(clear=True)
    judge(attend, dense_of(biased), SIZES.inputs(torch.float32), (), None)
    assert [d.chosen for d in decisions(clear=True)] == [route] * 2 * bool(route)


def test_triton_compiles():
    """What Triton's interpreter takes for a number may be many, which its compiler refuses."""
    q, k, v = (torch.randn(1, 2, LENGTH, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kernels = attention_kernels(lambda *x: flex_attention(*x, biased()), q, k, v, target="sm_90")
    assert len(kernels) == 3
