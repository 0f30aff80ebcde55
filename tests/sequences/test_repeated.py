"""A layer's calls from step to step, against dense float64."""

import math

import pytest
import torch

from flex_inductor import Sequences
from flex_inductor.sequences.repeated import Repeated, Step

HEADS, KV_HEADS, DIM = 4, 2, 16


def dense(q, k_cache, v_cache, sequences, seen, bias, sinks):
    out = []
    for n, (first, last) in enumerate(zip(sequences.cu_q, sequences.cu_q[1:], strict=False)):
        keys = int(sequences.used_k[n])
        where = sequences.pages[n].long()
        k, v = (
            cache[where].flatten(0, 1)[:keys].double().repeat_interleave(HEADS // KV_HEADS, 1)
            for cache in (k_cache, v_cache)
        )
        q_idx, kv_idx = torch.arange(keys - int(last - first), keys)[:, None], torch.arange(keys)
        h = torch.arange(HEADS)[:, None, None]
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), k) / math.sqrt(DIM) + bias(
            h, q_idx, kv_idx
        )
        scores = scores.masked_fill(~seen(n, h, q_idx, kv_idx), -math.inf)
        extra = (
            torch.full((HEADS, len(q_idx), 1), -math.inf)
            if sinks is None
            else sinks.double().view(-1, 1, 1).expand(-1, len(q_idx), 1)
        )
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


def packed(queries, keys, page, seed, width=None):
    """Sequences in pages in no order."""
    generator = torch.Generator().manual_seed(seed)
    width = width or -(-max(keys) // page)
    pages = torch.randperm(len(keys) * width, generator=generator).view(len(keys), width).to(torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    return Sequences(starts, used_k=torch.tensor(keys, dtype=torch.int32), pages=pages, page_size=page)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


MASKS = {
    "causal": causal,
    "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 9),
    "of heads": lambda b, h, q_idx, kv_idx: ((h + q_idx + kv_idx) % 3 == 0) | (q_idx == kv_idx),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extras", [False, True])
def test_steps(mask, extras):
    """Prompts, chunks of them and single tokens, in any order; a layer's mods, sinks and strides."""
    table, sinks = (
        (torch.randn(HEADS, 100), torch.randn(HEADS)) if extras else (torch.zeros(HEADS, 100), None)
    )

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx]

    layer = Repeated(score_mod if extras else None, DIM**-0.5, sinks)
    cache = torch.randn(40, 16, KV_HEADS, 2 * DIM)
    apart = [cache[..., :DIM], cache[..., DIM:]]
    for queries, keys, caches in (
        ([20, 1, 3], [20, 40, 64], apart),
        ([1, 1], [33, 2], apart),
        ([1], [50], apart),
        ([7, 2, 1], [7, 40, 9], apart),
        ([1, 1], [34, 3], [each.contiguous() for each in apart]),
    ):
        sequences = packed(queries, keys, 16, seed=len(keys))
        q = torch.randn(sum(queries), HEADS, DIM)
        step = Step(sequences.mask(MASKS[mask], heads=HEADS), *caches)
        found = layer(q, *caches, step)
        expected = dense(q, *caches, sequences, MASKS[mask], lambda h, q, kv: table[h, q - kv], sinks)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("page, mask", [(16, "causal"), (128, "window")])
def test_steps_of_decoding_move(page, mask):
    """The step's tables are those of the next one, with new pages and lengths."""
    layer = Repeated(None, DIM**-0.5)
    caches = [torch.randn(12, page, KV_HEADS, DIM) for _ in range(2)]
    first = packed([1, 1, 1], [page - 2, 1, 2 * page - 2], page, 0, width=3)
    step = Step(first.mask(MASKS[mask]), *caches)
    for more in range(4):  # over the end of a page
        keys = [page - 2 + more, 1 + more, 2 * page - 2 + more]
        sequences = packed([1, 1, 1], keys, page, more, width=3)
        assert step.move_to(sequences.used_k, sequences.pages)
        q = torch.randn(3, HEADS, DIM)
        expected = dense(q, *caches, sequences, MASKS[mask], lambda h, q, kv: 0.0, None)
        torch.testing.assert_close(layer(q, *caches, step).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "count, width, mask",
    [
        (2, 2, None),  # fewer sequences
        (3, 3, None),  # more pages
        (3, 2, MASKS["of heads"]),  # a mask that lengths change
    ],
)
def test_other_steps_do_not_move(count, width, mask):
    caches = [torch.randn(12, 16, KV_HEADS, DIM) for _ in range(2)]
    step = Step(packed([1, 1, 1], [4, 5, 6], 16, 0, width=2).mask(mask, heads=HEADS), *caches)
    others = packed([1] * count, [5, 6, 7][:count], 16, 1, width=width)
    assert not step.move_to(others.used_k, others.pages)


def test_a_step_with_a_chunk_does_not_move():
    caches = [torch.randn(12, 16, KV_HEADS, DIM) for _ in range(2)]
    chunk = packed([1, 1, 2], [4, 5, 6], 16, 0, width=2)
    assert not Step(chunk.mask(causal), *caches).move_to(chunk.used_k, chunk.pages)


def test_tables_change_in_place_and_kernels_stay():
    """A captured tensor is read in each call; a call like an earlier one traces and compiles nothing."""
    table, traced = torch.zeros(100), []

    def score_mod(score, b, h, q_idx, kv_idx):
        traced.append(1)
        return score + table[q_idx - kv_idx]

    layer = Repeated(score_mod, DIM**-0.5)
    caches = [torch.randn(12, 16, KV_HEADS, DIM) for _ in range(2)]
    for n in range(4):
        sequences = packed([1, 1, 1], [4 + n, 5, 60], 16, n, width=4)
        step = Step(sequences.mask(causal), *caches)
        table.normal_()
        q = torch.randn(3, HEADS, DIM)
        expected = dense(q, *caches, sequences, causal, lambda h, q, kv: table[q - kv], None)
        torch.testing.assert_close(layer(q, *caches, step).double(), expected, atol=2e-5, rtol=2e-5)
        if n == 0:
            traced.clear()
    assert not traced
