"""The project's kernels as cards get them, executed: forward and backward against fp64."""

import pytest
import torch

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.reference import reference
from flex_inductor.tools import execute
from tests.marks import slow_but

LENGTH = 96


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


CASES = [(t, d) for t in ("sm_80", "sm_90") for d in (torch.float16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(
    "case", slow_but(CASES, ("sm_80", torch.bfloat16), ("sm_90", torch.float16)), ids=str
)
def test_forward_and_backward(case):
    target, dtype = case
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, LENGTH, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    slopes = torch.rand(2, requires_grad=True)
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, m, n: s - slopes[h] * (m - n), mask)

    launches = []
    out = execute.compiled(attend, target, launches)(*rows)
    grad = torch.randn_like(out)
    out.backward(grad)
    names = [name for name, _ in launches]
    assert [name.rpartition("_")[0] for name in names if name.startswith("flex_inductor")] == [
        "flex_inductor_forward", "flex_inductor_backward_dq", "flex_inductor_backward_dkdv",
    ]  # fmt: skip
    found = [out, *(t.grad for t in (*rows, slopes))]

    exact = [t.detach().double().requires_grad_() for t in (*rows, slopes)]
    want, *_ = reference(*exact[:3], lambda s, b, h, m, n: s - exact[3][h] * (m - n), mask)
    want.backward(grad.double())
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, [want, *(t.grad for t in exact)], strict=True):
        assert (one.double() - other).abs().max() <= 8 * eps * max(1, other.abs().max())
