"""Tables that a mod makes itself, of positions or of one number, are read like captured ones."""

from __future__ import annotations

import pytest
import torch

from flex_inductor import decisions, flex_attention
from flex_inductor.tools.inspector import attention_kernels
from flex_inductor.tools.resources import compile_for
from tests.support import MADE, Sizes, attention_of, dense_of, judge, makes_tables

SIZES = Sizes(1, 2, 1, MADE, MADE)


@pytest.mark.parametrize("route", [None, "cpu"])
def test_values(route):
    torch._dynamo.reset()
    attend = attention_of(makes_tables)
    if route:
        attend = torch.compile(attend, backend="flex_inductor", fullgraph=True, options={"route": route})
    decisions(clear=True)
    judge(attend, dense_of(makes_tables), SIZES.inputs(torch.float32), (), None)
    assert [d.chosen for d in decisions(clear=True)] == [route] * 2 * bool(route)


def test_triton_compiles():
    """What Triton's interpreter takes for a number may be many, which its compiler refuses."""
    q, k, v = (torch.randn(1, 2, MADE, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kernels = attention_kernels(lambda *x: flex_attention(*x, makes_tables()), q, k, v, target="sm_90")
    assert len(kernels) == 3
    for kernel in kernels:
        compile_for(kernel, kernel.configs[0], "sm_90")
