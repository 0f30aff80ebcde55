"""Mods x masks x dtypes x layouts: outputs and all gradients, against dense attention and fp64."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support import LAYOUTS, MASKS, MODS, Sizes, attention_of, dense_of, judge

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = Sizes()


@functools.cache
def block_mask_of(mask: str, sizes: Sizes):
    return MASKS[mask](sizes)


def check(mod: str, mask: str, dtype: str, layout: str = "contiguous", sizes: Sizes = SIZES, attend=None):
    captures, build = MODS[mod]
    inputs = [LAYOUTS[layout](t) for t in sizes.inputs(DTYPES[dtype])]
    attend = attend or attention_of(build)
    return judge(attend, dense_of(build), inputs, captures(sizes), block_mask_of(mask, sizes))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_mods_and_masks(mod, mask):
    check(mod, mask, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mod, mask", [("plain", "causal"), ("alibi", "document"), ("position_bias", "per_head")]
)
def test_dtypes(mod, mask, dtype):
    check(mod, mask, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts(layout, dtype):
    check("relative_bias", "prefix", dtype, layout)
