"""Gradients against finite differences, and that they are the same bits every time."""

from __future__ import annotations

import pytest
import torch

from flex_inductor import flex_attention
from flex_inductor.op.eager import tiles
from tests.support import MASKS, MODS, Cube, Sizes, attention_of, dense_of, judge, run

TINY = Sizes(batch=1, heads=2, kv_heads=1, queries=5, keys=6, head_dim=3, value_dim=2)


GRADCHECK_MODS = {
    **{
        name: MODS[name]
        for name in ("relative_bias", "bucketed_bias", "position_bias", "learned_temperature")
    },
    "nested": (
        lambda s: (torch.randn(3, 4, dtype=torch.float64), torch.arange(s.keys) % 4),
        lambda table, to: (
            lambda score, b, h, q_idx, kv_idx: score * table[h, to[kv_idx]] + table[2][to[q_idx]] ** 2
        ),
    ),
    "reduced": (
        lambda s: (torch.randn(4, dtype=torch.float64),),
        lambda bias: lambda score, b, h, q_idx, kv_idx: score * bias.exp().sum() + bias[kv_idx % 4],
    ),
    "whole rows": (
        lambda s: (
            torch.randn(s.queries, 2, dtype=torch.float64),
            torch.randn(2, s.keys, dtype=torch.float64),
        ),
        lambda left, right: lambda score, b, h, q_idx, kv_idx: score + (left[q_idx] * right[:, kv_idx]).sum(),
    ),
    "own derivative": (
        lambda s: (torch.randn(s.queries, dtype=torch.float64),),
        lambda bias: lambda score, b, h, q_idx, kv_idx: score + Cube.apply(bias[q_idx] + 0.1 * score),
    ),
}


@pytest.mark.parametrize("name", GRADCHECK_MODS)
def test_gradcheck(name, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_CHUNK_KEYS", 4)
    monkeypatch.setattr(tiles, "MAX_CHUNK_QUERIES", 2)
    make_captures, build = GRADCHECK_MODS[name]
    captures = [c.clone().requires_grad_(c.is_floating_point()) for c in make_captures(TINY)]
    inputs = [t.requires_grad_() for t in TINY.inputs(torch.float64)]
    mask = MASKS["per_head"](TINY)

    def attend(query, key, value, *captures):
        return flex_attention(query, key, value, build(*captures), mask, enable_gqa=True, return_lse=True)

    # The last head sees every key only from some rows on: rows without a key have lse -inf.
    def finite(*args):
        out, lse = attend(*args)
        return out, torch.where(lse == -float("inf"), 0.0, lse)

    assert torch.autograd.gradcheck(finite, (*inputs, *captures), fast_mode=True)


@pytest.mark.parametrize("name", ["relative_bias", "bucketed_bias", "learned_temperature"])
def test_captured_gradients_are_the_same_bits_every_time(name):
    sizes = Sizes(batch=2, heads=4, kv_heads=2, queries=200, keys=300)
    captures, build = MODS[name]
    captures = [c.float() if c.is_floating_point() else c for c in captures(sizes)]
    mask = MASKS["sliding_window"](sizes)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            results.append(run(attention_of(build), sizes.inputs(torch.float32), captures, mask).d_captures)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            assert first is None or torch.equal(first, again)


def test_lanes_that_nobody_sees_have_no_part_in_captured_gradients():
    """Where they are masked, the derivative of the root is infinite or NaN; the reference takes another one there."""
    sizes = Sizes(batch=1, heads=2, kv_heads=2, queries=40, keys=40)

    def rooted(least):
        def build(factor):
            return lambda score, b, h, q_idx, kv_idx: (
                score + (factor * (q_idx - kv_idx + 1).clamp(min=least)).sqrt()
            )

        return build

    inputs, captures = sizes.inputs(torch.float32), [torch.tensor(0.7, dtype=torch.float64)]
    judge(attention_of(rooted(-40)), dense_of(rooted(1)), inputs, captures, MASKS["causal"](sizes))


def test_batches_that_share_keys_in_one_tile():
    sizes = Sizes(batch=3, heads=2, kv_heads=1, queries=5, keys=6, kv_batch=1)
    judge(attention_of(None), dense_of(None), sizes.inputs(torch.float64))
