"""Which calls with few queries get a kernel of their own, and how many heads share its tile."""

import pytest
import torch

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.tools.inspector import attention_kernels, kind

FULL = 512  # batches: more instances than multiprocessors


def kernels(
    queries, heads, kv_heads=1, batch=FULL, keys=256, head_dim=64, target="sm_90", mask_mod=None, **options
):
    torch._dynamo.reset()
    q = torch.randn(1, heads, queries, head_dim, dtype=torch.bfloat16).expand(batch, -1, -1, -1)
    k = torch.randn(1, kv_heads, keys, head_dim, dtype=torch.bfloat16).expand(batch, -1, -1, -1)
    mask = mask_mod and create_block_mask(mask_mod, None, heads, queries, keys, "cpu")

    def attend(q, k):
        return flex_attention(q, k, k, block_mask=mask, enable_gqa=True, kernel_options=options or None)

    return attention_kernels(attend, q, k, target=target)


def rows(*sizes, **call):
    """The kinds of a call's kernels, and the rows of the first one's tile."""
    found = kernels(*sizes, **call)
    return *map(kind, found), found[0].configs[0]["BLOCK_M"]


@pytest.mark.parametrize(
    "sizes, call, wanted",
    [
        ((16, 8), {}, ("decode", 128)),
        ((13, 8), {}, ("decode", 128)),
        ((13, 8), {"batch": 1}, ("decode", "combine", 128)),
        ((40, 8), {"target": "sm_80"}, ("decode", 128)),  # 2 heads of 8 in a tile
        ((40, 8), {}, ("forward", 64)),  # whose tile has no more rows for a head
        ((1, 6), {}, ("decode", 16)),
        ((16, 6), {"head_dim": 256, "target": "sm_120"}, ("decode", 64)),  # 3: more leave too few registers
        ((1, 1), {}, ("decode", 16)),  # nothing to pack, and 127 rows fewer than the forward's tile
        ((16, 8), {"mask_mod": lambda b, h, q, k: q >= k + h}, ("decode", 16)),  # a schedule for each head
        ((64, 8), {"head_dim": 256, "target": "sm_80"}, ("forward", 32)),  # none is idle
        ((65, 8), {}, ("forward", 64)),
        ((16, 8), {"fwd_BLOCK_M": 64}, ("forward", 64)),
    ],
)
def test_rows_that_the_forward_would_leave_idle_decide(sizes, call, wanted):
    assert rows(*sizes, **call) == wanted


def test_lengths_that_change_are_left_to_the_forward():
    q, k = torch.randn(FULL, 8, 16, 64), torch.randn(FULL, 1, 256, 64)
    torch._dynamo.mark_dynamic(q, 2)
    (kernel,) = attention_kernels(lambda q, k: flex_attention(q, k, k, enable_gqa=True), q, k, target="sm_90")
    assert kind(kernel) == "forward"
