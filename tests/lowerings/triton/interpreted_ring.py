"""Triton kernels whose results are parts of sums, in Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
import torch.distributed as dist
from support import served_by

from flex_inductor import flex_attention, set_eager_kernels
from flex_inductor.distributed.context import context_parallel
from flex_inductor.masks import causal
from flex_inductor.tools import interpret
from flex_inductor.tools.environment import triton_on_cpu

LENGTH = 80


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_ring(alone):
    """A rank by itself attends to its keys in two steps, whose results in fp32 are merged by their logsumexp."""
    mask = context_parallel(alone, "ring").plan(causal(), LENGTH, block=32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, LENGTH, 16), (1, 2, LENGTH, 16), (1, 2, LENGTH, 16), (4, LENGTH)]
    given = [torch.randn(shape, generator=generator).half() for shape in shapes]

    def attend(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
        *rows, table = leaves

        def biased(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx - kv_idx]

        out, lse = flex_attention(*rows, biased, mask, enable_gqa=True, return_lse=True)
        return out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), leaves)

    before = set_eager_kernels("always")
    try:
        with triton_on_cpu(interpret._load), served_by("triton", "triton"):
            found = attend(torch.float16)
    finally:
        set_eager_kernels(before)
    for got, gold in zip(found, attend(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), gold, rtol=2e-3, atol=4e-3)
