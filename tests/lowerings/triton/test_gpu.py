"""The Triton kernels on a card: `tools/gpu_check.sh` runs these. None has run yet."""

import pytest
import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import decisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

SIZES = (Sizes(queries=300, keys=300, head_dim=64, value_dim=64), Sizes(queries=200, keys=333, head_dim=80))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", ["none", "causal", "sliding_window", "per_head"])
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("sizes", SIZES)
def test_as_right_as_dense_attention(mod, mask, dtype, sizes):
    torch._dynamo.reset()
    decisions(clear=True)
    block_mask = MASKS[mask](sizes)
    attend = torch.compile(attention_of(MODS[mod].build), backend="flex_inductor")
    judge(
        attend,
        dense_of(MODS[mod].build),
        [tensor.cuda() for tensor in sizes.inputs(dtype)],
        [capture.cuda() for capture in MODS[mod].captures(sizes)],
        None if block_mask is None else block_mask.to("cuda"),
    )
    assert [decision.chosen for decision in decisions()] == ["triton", "triton"]


@pytest.mark.parametrize("keys", [1000, 8192])
def test_one_query(keys):
    torch._dynamo.reset()
    sizes = Sizes(batch=1, heads=32, kv_heads=8, queries=1, keys=keys, head_dim=128, value_dim=128)
    attend = torch.compile(attention_of(None), backend="flex_inductor")
    judge(attend, dense_of(None), [tensor.cuda() for tensor in sizes.inputs(torch.bfloat16)])
