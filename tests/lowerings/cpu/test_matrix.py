"""The fused CPU kernels, forward and backward, judged by fp64 over mods, masks, dtypes, layouts and shapes."""

from __future__ import annotations

import pytest
import torch

from tests.lowerings.cpu.helpers import check
from tests.support import LAYOUTS, MASKS, MODS, Sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Every mod, mask, dtype and layout.
SHORT = [
    (mod, list(MASKS)[(i + 1) % len(MASKS)], DTYPES[i % 3], list(LAYOUTS)[i % len(LAYOUTS)])
    for i, mod in enumerate((*MODS, "relative_bias"))
]


@pytest.mark.parametrize("mod, mask, dtype, layout", SHORT)
def test_matrix(mod, mask, dtype, layout):
    check(mod, mask, dtype, layout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_every_mod_and_mask(mod, mask, dtype):
    layouts = list(LAYOUTS)
    place = list(MODS).index(mod) + list(MASKS).index(mask) + DTYPES.index(dtype)
    check(mod, mask, dtype, layouts[place % len(layouts)])


@pytest.mark.parametrize(
    "dtype, sizes",
    [
        (torch.bfloat16, Sizes(queries=131, keys=257, head_dim=7, value_dim=33, kv_heads=1)),
        (torch.float32, Sizes(queries=20, keys=1, head_dim=80, value_dim=96, kv_batch=1)),
        (
            torch.float32,
            Sizes(batch=1, heads=1, kv_heads=1, queries=33, keys=40, head_dim=512, value_dim=512),
        ),
        pytest.param(
            torch.bfloat16, Sizes(queries=17, keys=33, head_dim=1, value_dim=1), marks=pytest.mark.slow
        ),
        (torch.float32, Sizes(batch=5, heads=4, kv_heads=2, queries=40, keys=30, head_dim=1, value_dim=2)),
    ],
    ids=str,
)
def test_shapes(dtype, sizes):
    check("relative_bias", "causal", dtype, sizes=sizes)


FEW = Sizes(batch=2, heads=8, kv_heads=2, queries=1, keys=5000, head_dim=40, value_dim=24)


@pytest.mark.parametrize(
    "mod, mask, dtype, layout, sizes",
    [
        ("alibi", "none", torch.float32, "contiguous", FEW),
        ("softcap", "per_batch", torch.bfloat16, "bshd", FEW._replace(queries=3)),
        ("bucketed_bias", "per_head", torch.float16, "head_dim_stride", FEW._replace(queries=2, keys=300)),
        ("plain", "blocks_only", torch.float32, "expanded", FEW._replace(queries=4, kv_batch=1, head_dim=7)),
    ],
)
def test_few_queries(mod, mask, dtype, layout, sizes):
    check(mod, mask, dtype, layout, sizes)
