"""Generated Triton kernels run by Triton's interpreter: shapes, layouts, scales. See test_interpreted.py."""

import functools

import pytest
import torch
from marks import slow_but
from support import LAYOUTS, MASKS, MODS, Sizes, attention_of, dense_of, judge, run, served_by

from flex_inductor import BlockMask, create_block_mask, decisions, flex_attention
from flex_inductor.lowerings.triton import kernel
from flex_inductor.tools import interpret
from tests.accuracy import test_latent

SHAPES = {
    "one KV batch": (Sizes(kv_batch=1, queries=40, keys=50), "none"),
    "one KV head": (Sizes(batch=1, kv_heads=1, queries=40), "causal"),
    "narrow heads": (Sizes(batch=1, queries=40, keys=50, head_dim=1, value_dim=3), "none"),
    "single tokens": (Sizes(batch=1, queries=1, keys=1), "causal"),
    "one query": (Sizes(batch=1, queries=1, keys=300), "none"),
    "odd heads": (
        Sizes(batch=1, heads=2, kv_heads=1, queries=33, keys=31, head_dim=80, value_dim=65),
        "causal",
    ),
    "whole tiles": (
        Sizes(batch=1, heads=2, kv_heads=1, queries=64, keys=128, head_dim=32, value_dim=32),
        "document",
    ),
}


FEW_QUERIES = {
    "heads in one tile": (Sizes(batch=1, queries=5, keys=300), "causal"),
    "most of a group": (Sizes(batch=1, kv_heads=1, queries=16, keys=256, head_dim=32), "document"),
    "half a group": (Sizes(batch=1, heads=8, kv_heads=1, queries=20, keys=300), "causal"),
    "a schedule for each head": (Sizes(batch=1, queries=3, keys=400), "per_head"),
    "one KV batch": (Sizes(heads=2, kv_heads=1, queries=3, keys=400, kv_batch=1), "per_batch"),
}


SMALL = Sizes(heads=2, kv_heads=1)


def judge_interpreted(mod, sizes, mask, layout="contiguous", scale=None):
    build, captures = MODS[mod].build, MODS[mod].captures(sizes)
    inputs = [LAYOUTS[layout](tensor) for tensor in sizes.inputs(torch.float32)]
    with served_by("triton", "triton"):
        attend = interpret.compiled(attention_of(build, scale))
        judge(attend, dense_of(build, scale), inputs, captures, MASKS[mask](sizes))


@pytest.mark.parametrize("shape", slow_but(SHAPES, "one query", "odd heads"))
def test_shapes(shape):
    judge_interpreted("position_bias", *SHAPES[shape])


@pytest.mark.parametrize("shape", slow_but(FEW_QUERIES, "most of a group"))
def test_few_queries_split_the_keys(shape, kinds):
    judge_interpreted("position_bias", *FEW_QUERIES[shape])
    assert kinds == ["decode", "combine", "backward_dq", "backward_dkdv"]


def test_wide_heads_have_a_kernel_for_each_gradient(kinds):
    sizes = Sizes(batch=1, queries=40, keys=48, head_dim=130, value_dim=24)
    judge_interpreted("position_bias", sizes, "causal")
    assert sorted(kinds) == ["backward_dk", "backward_dq", "backward_dv", "forward"]


def _columns_apart(tensor):
    """The last column lies behind 2**31 numbers, of which memory is never touched."""
    return torch.empty_strided(tensor.shape, (0, 0, 1, 2**31 // 60), dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize("queries", [3, 70])
def test_columns_further_apart_than_32_bits(queries, kinds):
    query, key = (torch.randn(1, 1, n, 64, dtype=torch.float16) for n in (queries, 300))
    with served_by("triton"):
        out = interpret.compiled(flex_attention, dynamic=False)(*map(_columns_apart, (query, key)), key)
    torch.testing.assert_close(out, flex_attention(query, key, key), rtol=2e-3, atol=2e-3)
    assert kinds == (["decode", "combine"] if queries == 3 else ["forward"])


@pytest.mark.parametrize("few", slow_but([False, True], True))
def test_more_heads_and_batches_than_a_grid_has_room_for(few, monkeypatch):
    monkeypatch.setattr(kernel, "LARGEST_GRID", 1)
    sizes, mask = FEW_QUERIES["one KV batch"] if few else (Sizes(queries=40, keys=50), "per_head")
    places = []
    call = kernel.Launch.grid
    monkeypatch.setattr(kernel.Launch, "grid", lambda *args: places.append(call(*args)) or places[-1])
    judge_interpreted("position_bias", sizes, mask)
    assert len(places) >= 3 and {place[1:] for place in places} == {(1, 1)}


@pytest.mark.parametrize("length", slow_but([200, 250], 250))
def test_blocks_that_reach_far_beyond_the_last_query(length):
    sizes = Sizes(batch=1, heads=2, kv_heads=1, queries=length, keys=100)
    mask = create_block_mask(
        lambda b, h, q, k: q + 60 >= k, None, None, length, 100, "cpu", BLOCK_SIZE=(96, 32)
    )
    with served_by("triton", "triton"):
        attend = interpret.compiled(attention_of(None))
        judge(attend, dense_of(None), sizes.inputs(torch.float32), (), mask)


@pytest.mark.parametrize(
    "layout", slow_but((n for n in LAYOUTS if n != "contiguous"), "head_dim_stride", "expanded")
)
def test_layouts(layout):
    judge_interpreted("relative_bias", Sizes(heads=2, kv_heads=1, queries=40, keys=48), "causal", layout)


def test_garbage_beyond_the_keys_and_in_blocks_that_nobody_visits():
    sizes = SMALL
    mask = create_block_mask(
        lambda b, h, q, k: (k // 32 != 1) & (q + 60 >= k), None, None, sizes.queries, sizes.keys, "cpu", 32
    )
    attend, results = interpret.compiled(attention_of(None)), []
    query, *caches = sizes._replace(keys=160).inputs(torch.float32)
    with served_by("triton"):
        for garbage in (0.0, float("nan"), float("inf")):
            for cache in caches:
                cache[:, :, 32:64] = cache[:, :, sizes.keys :] = garbage
            inputs = (query, *(cache[:, :, : sizes.keys] for cache in caches))
            results.append(run(attend, inputs, (), mask).named())
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("scale", slow_but([0.0, -0.5, 3.0], -0.5))
def test_scales(scale):
    judge_interpreted("plain", Sizes(batch=1, queries=20, keys=20), "causal", scale=scale)


def test_lengths_that_change_compile_once():
    build, captures = MODS["relative_bias"].build, MODS["relative_bias"].captures
    attend = interpret.compiled(attention_of(build), dynamic=True)
    compiled = []
    for sizes in (SMALL, SMALL._replace(batch=3, queries=20, keys=34), SMALL._replace(queries=64, keys=96)):
        decisions(clear=True)
        inputs = sizes.inputs(torch.float32)
        judge(attend, dense_of(build), inputs, captures(sizes), MASKS["causal"](sizes))
        compiled.append([decision.chosen for decision in decisions()])
    assert compiled[0] == ["triton", "triton"] and compiled[-1] == []


def test_groups_that_share_an_instance(monkeypatch):
    from flex_inductor.lowerings.triton import backward

    monkeypatch.setattr(backward, "ENOUGH_INSTANCES", 0)
    judge_interpreted("plain", Sizes(batch=1), "causal")


def test_a_mask_without_lists_of_queries_serves_all_but_keys_and_values():
    sizes = Sizes(batch=1, queries=64, keys=64)
    full = MASKS["causal"](sizes)
    mask = BlockMask(
        full.seq_lengths, full.kv_num_blocks, full.kv_indices, full.full_kv_num_blocks,
        full.full_kv_indices, None, None, None, None, full.BLOCK_SIZE, full.mask_mod,
    )  # fmt: skip
    query, key, value = sizes.inputs(torch.float32)

    def attend(query, key, value):
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

    for tensor, route in ((query, "triton"), (key, "chunked")):
        torch._dynamo.reset()
        tensor.requires_grad_()
        out = interpret.run(attend, query, key, value)
        (got,) = torch.autograd.grad(out.sum(), tensor)
        (want,) = torch.autograd.grad(attend(query, key, value).sum(), tensor)
        torch.testing.assert_close(got, want)
        assert decisions()[-1].chosen == route
        tensor.requires_grad_(False)
    assert "without lists of queries" in dict(decisions()[-1].rejected)["triton"]


def test_inside_a_model():
    """Inputs and captures that are views of what the graph computes, two layers, a loss after them."""
    torch.manual_seed(0)
    project, bias = torch.nn.Linear(32, 96), torch.nn.Parameter(torch.randn(3, 2, 80))
    mask = MASKS["causal"](Sizes(queries=40, keys=40))

    def loss(x):
        shifted = (bias * 2).tanh()[1]
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in project(x).chunk(3, dim=-1))
            out = flex_attention(q, k, v, lambda s, b, h, m, n: s + shifted[h, m - n + 40], mask)
            x = x + out.transpose(1, 2).flatten(-2)
        return x.square().mean()

    x = torch.randn(2, 40, 32)
    wanted = (project.weight, project.bias, bias)
    with served_by(*["triton"] * 4):
        got = torch.autograd.grad(interpret.run(loss, x), wanted)
    for mine, want in zip(got, torch.autograd.grad(loss(x), wanted), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("call", slow_but(test_latent.CALLS, "wide, token"))
def test_latent_keys(call):
    with served_by("triton"):
        test_latent.judged(call, functools.partial(interpret.compiled, dynamic=False))
