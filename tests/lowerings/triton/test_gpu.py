"""The Triton kernels on a card: `tools/gpu_check.sh` runs these. None has run yet."""

import pytest
import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge, served_by

from flex_inductor import create_block_mask, decisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

SIZES = (Sizes(queries=300, keys=300, head_dim=64, value_dim=64), Sizes(queries=200, keys=333, head_dim=80))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def turns(*kinds):
    """Every member of the first with members of the others in turn: few enough to compile in some minutes."""
    first, *others = map(list, kinds)
    return [(each, *(other[i % len(other)] for other in others)) for i, each in enumerate(first)]


CASES = [
    *turns(MODS, MASKS, DTYPES, SIZES),
    *turns(MASKS, [*MODS][::-1], DTYPES[::-1], SIZES[::-1]),
]


def check(mod, mask, dtype, sizes, **options):
    """Compare the compiled call and its gradients with dense attention; returns what was decided."""
    torch._dynamo.reset()
    with torch.device("cuda"):
        block_mask = MASKS[mask](sizes)
    attend = torch.compile(attention_of(MODS[mod].build), backend="flex_inductor", options=options)
    with served_by("triton", "triton"):
        judge(
            attend,
            dense_of(MODS[mod].build),
            [tensor.cuda() for tensor in sizes.inputs(dtype)],
            [capture.cuda() for capture in MODS[mod].captures(sizes)],
            block_mask,
        )
    return [kernel for decision in decisions() for kernel in decision.kernels]


@pytest.mark.parametrize("first, second, dtype, sizes", CASES)
def test_as_right_as_dense_attention(first, second, dtype, sizes):
    mod, mask = (first, second) if first in MODS else (second, first)
    check(mod, mask, dtype, sizes)


@pytest.mark.parametrize(
    "configs",
    [
        {"forward": {"persistent": 1}},
        {
            "forward": {"descriptors": 1},
            "backward_dq": {"descriptors": 1},
            "backward_dkdv": {"descriptors": 1},
        },
        {"forward": {"descriptors": 1, "persistent": 1}},
        {"forward": {"descriptors": 1, "persistent": 1, "held": 1}},
        {
            "forward": {"descriptors": 1, "specialized": 1},
            "backward_dq": {"descriptors": 1, "specialized": 1},
            "backward_dkdv": {"descriptors": 1, "specialized": 1},
        },
        {"backward_onepass": {}},
        {"backward_onepass": {"descriptors": 1}},
        {"backward_dk": {}, "backward_dv": {}},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "per_head"])
def test_configs_asked_for(configs, mask):
    capability = torch.cuda.get_device_capability()
    wanted = {axis for axes in configs.values() for axis in axes}
    if ("specialized" in wanted and capability[0] != 10) or ("descriptors" in wanted and capability < (9, 0)):
        pytest.skip("this card has no such kernels")
    made = check("relative_bias", mask, torch.bfloat16, SIZES[0], configs=configs)
    assert {kernel.kernel for kernel in made if kernel.why == "asked for"} >= configs.keys()


def test_tiles_chosen_whole():
    """In blocks of many tiles, at a length that none divides."""
    torch._dynamo.reset()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, "cuda", BLOCK_SIZE=512)
    inputs = [t.cuda() for t in Sizes(queries=1000, keys=1000, head_dim=64).inputs(torch.bfloat16)]
    attend = torch.compile(attention_of(None), backend="flex_inductor")
    with served_by("triton", "triton"):
        judge(attend, dense_of(None), inputs, (), mask)


def test_tuned():
    made = check("relative_bias", "causal", torch.bfloat16, SIZES[0], max_autotune=True)
    assert {"forward", "backward_dq", "backward_dkdv"} <= {kernel.kernel for kernel in made}


def test_wide_heads():
    check("alibi", "causal", torch.bfloat16, Sizes(queries=300, keys=300, head_dim=256, value_dim=256))


@pytest.mark.parametrize("keys", [1000, 8192])
def test_one_query(keys):
    torch._dynamo.reset()
    sizes = Sizes(batch=1, heads=32, kv_heads=8, queries=1, keys=keys, head_dim=128, value_dim=128)
    attend = torch.compile(attention_of(None), backend="flex_inductor")
    with served_by("triton", "triton"):
        judge(attend, dense_of(None), [tensor.cuda() for tensor in sizes.inputs(torch.bfloat16)])
