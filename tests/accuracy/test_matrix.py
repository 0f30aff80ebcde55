"""Mods x masks x dtypes x layouts: outputs and all gradients, against dense attention and fp64."""

from __future__ import annotations

import functools

import pytest
import torch

from flex_inductor import create_block_mask
from flex_inductor.backend import flex_inductor
from flex_inductor.op.eager import tiles
from tests.support import (
    LAYOUTS,
    MASKS,
    MODS,
    Sizes,
    attention_of,
    causal,
    dense_of,
    judge,
    served_by,
)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = Sizes()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles along queries, keys, heads and batches."""
    monkeypatch.setattr(tiles, "MAX_CHUNK_KEYS", 48)
    monkeypatch.setattr(tiles, "MAX_CHUNK_QUERIES", 40)
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", 5000)


@functools.cache
def block_mask_of(mask: str, sizes: Sizes):
    return MASKS[mask](sizes)


@functools.cache
def compiled(mod: str):
    attend, options = attention_of(MODS[mod].build), {"route": "chunked"}
    return torch.compile(attend, backend=flex_inductor, fullgraph=True, dynamic=False, options=options)


def check(mod: str, mask: str, dtype: str, layout: str = "contiguous", sizes: Sizes = SIZES, attend=None):
    captures, build = MODS[mod]
    inputs = [LAYOUTS[layout](t) for t in sizes.inputs(DTYPES[dtype])]
    attend = attend or attention_of(build)
    return judge(attend, dense_of(build), inputs, captures(sizes), block_mask_of(mask, sizes))


# Every mod and every mask at least twice, and every mod with another mask in each dtype.
PAIRS = [(mod, list(MASKS)[(i + j) % len(MASKS)]) for i, mod in enumerate(MODS) for j in (1, 4)]


@pytest.mark.parametrize("mod, mask", PAIRS)
def test_mods_and_masks(mod, mask):
    check(mod, mask, "fp32")


@pytest.mark.parametrize("dtype", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("mod, mask", PAIRS[::3])
def test_dtypes(mod, mask, dtype):
    check(mod, mask, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts(layout, dtype):
    check("relative_bias", "prefix", dtype, layout)


SHAPES = {
    "head dim 1": Sizes(head_dim=1, value_dim=1),
    "head dim 3": Sizes(head_dim=3, value_dim=5),
    "head dim 64": Sizes(head_dim=64, value_dim=64),
    "head dim 80, value 48": Sizes(head_dim=80, value_dim=48),
    "head dim 512": Sizes(batch=1, heads=2, kv_heads=1, head_dim=512, value_dim=512),
    "value 512": Sizes(batch=1, heads=2, kv_heads=2, head_dim=4, value_dim=512),
    "one query": Sizes(queries=1),
    "one key": Sizes(keys=1),
    "one of each": Sizes(batch=1, heads=1, kv_heads=1, queries=1, keys=1),
    "odd lengths": Sizes(queries=101, keys=37),
    "six heads to two": Sizes(heads=6, kv_heads=2),
    "five heads to one": Sizes(heads=5, kv_heads=1),
    "key/value for every batch": Sizes(batch=3, kv_batch=1),
    "grouped and for every batch": Sizes(batch=2, kv_batch=1, heads=6, kv_heads=3),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    check("position_bias", "causal", "fp32", sizes=SHAPES[shape])
    check("plain", "none", "fp64", sizes=SHAPES[shape])


@pytest.mark.parametrize("block", [16, 32, 128, (16, 128), (128, 32), (1, 1), (70, 100)], ids=str)
def test_block_sizes(block):
    mask = create_block_mask(causal, None, None, SIZES.queries, SIZES.keys, device="cpu", BLOCK_SIZE=block)
    captures, build = MODS["relative_bias"]
    judge(attention_of(build), dense_of(build), SIZES.inputs(torch.float32), captures(SIZES), mask)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale):
    inputs = SIZES.inputs(torch.float32)
    judge(attention_of(None, scale), dense_of(None, scale), inputs, (), block_mask_of("causal", SIZES))


def test_scores_of_large_magnitude():
    """exp of the scores themselves would overflow."""
    inputs = [t * 40 for t in SIZES.inputs(torch.float32)]
    judge(attention_of(None), dense_of(None), inputs, (), block_mask_of("causal", SIZES))


@pytest.mark.parametrize(
    "mod, mask, dtype, layout",
    [
        ("plain", "per_batch", "fp32", "bshd"),
        ("alibi", "document", "bf16", "contiguous"),
        ("bucketed_bias", "per_head", "fp64", "strided"),
        ("position_bias", "blocks_only", "fp32", "expanded"),
        ("learned_temperature", "sliding_window", "fp16", "head_dim_slice"),
    ],
)
def test_compiled(mod, mask, dtype, layout):
    """By the chunks, whatever the dtype; lowerings/cpu/test_matrix.py has the fused kernels."""
    with served_by("chunked", "chunked"):
        check(mod, mask, dtype, layout, attend=compiled(mod))


def test_compiled_grouped_heads_for_every_batch():
    torch._dynamo.reset()
    sizes = Sizes(heads=6, kv_heads=2, kv_batch=1)
    with served_by("chunked", "chunked"):
        check("plain", "none", "fp32", sizes=sizes, attend=compiled("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_everything(mod, mask, dtype, layout):
    check(mod, mask, dtype, layout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_everything_compiled(mod, mask, dtype):
    torch._dynamo.reset()
    with served_by("chunked", "chunked"):
        check(mod, mask, dtype, "bshd", attend=compiled(mod))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mod", MODS)
def test_every_shape(mod, shape):
    for dtype in ("fp32", "bf16"):
        check(mod, "none", dtype, sizes=SHAPES[shape])
        check(mod, "document", dtype, sizes=SHAPES[shape])
