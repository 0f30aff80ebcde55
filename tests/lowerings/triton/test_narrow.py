"""What keys and values of 8 bits cost on cards that are not there."""

import pytest
import torch

from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_untuned
from tests.marks import slow_but

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KERNELS = [
    (target, head_dim, queries, dtype, narrow)
    for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
    for head_dim in (64, 128, 256)
    for queries in (1024, 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for narrow in (E4M3, E5M2)
]


@pytest.mark.parametrize(
    "case",
    slow_but(KERNELS, ("sm_90", 64, 1024, torch.bfloat16, E4M3), ("sm_90", 128, 1024, torch.bfloat16, E5M2)),
    ids=str,
)
def test_loops_have_no_local_memory(case):
    target, head_dim, queries, dtype, narrow = case
    query = torch.randn(2, 8, queries, head_dim, dtype=dtype)
    key, value = (torch.randn(2, 2, 1024, head_dim).to(narrow) for _ in range(2))
    scale = torch.rand(2, 2, 1024)

    def attend(*qkv):
        return flex_attention(*qkv, enable_gqa=True, k_scale=scale, v_scale=scale)

    kernel = next(
        k for k in attention_kernels(attend, query, key, value, target=target) if kind(k) != "combine"
    )
    _, compiled, needed = compile_untuned(kernel, target)
    assert not any(loop.local for loop in needed.loops)
    assert (needed.spill_bytes or 0) <= 16
    assert compiled.metadata.shared <= known_device(target).shared_bytes


@pytest.mark.slow
def test_warps_share_what_they_widen():
    """sm_80's products take operands from registers, and 8 warps all keys: alone each would convert 128 numbers a lane
    of a tile of 64 keys, of which it converts 16."""
    query = torch.randn(1, 2, 256, 64, dtype=torch.float16)
    key, value = (torch.randn(1, 2, 1024, 64).to(E5M2) for _ in range(2))
    (kernel,) = attention_kernels(flex_attention, query, key, value, target="sm_80")
    config, compiled, _ = compile_untuned(kernel, "sm_80")
    lanes = 32 * config["num_warps"]
    numbers = 2 * config["BLOCK_N"] * 64 // lanes
    assert compiled.asm["ptx"].count("prmt.b32") <= 2 * numbers
