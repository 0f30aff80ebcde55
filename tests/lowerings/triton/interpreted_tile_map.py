"""Generated Triton kernels whose tiles lie where a map says, in Triton's interpreter. See test_interpreted.py."""

from typing import Any, NamedTuple

import pytest
import torch
from marks import slow_but
from support import assert_accurate, assert_within, bounded, causal, judge, served_by

from flex_inductor import Sequences, create_block_mask, decisions, varlen_attention
from flex_inductor.mod_ir.arguments import score_dtype
from flex_inductor.op import Inputs, attention
from flex_inductor.options import CallOptions
from flex_inductor.reference import reference
from flex_inductor.tools import interpret
from flex_inductor.visits.places import BATCH, COUNT, ROW
from tests.tile_maps import Part, as_runs, packed

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3
HEAD = 2  # that mods see as the first one
ALL = CallOptions(lse=True, max_scores=True)


class Piece(NamedTuple):
    """What is attention of its own: its rows in batch 0, its keys, and what mods see there."""

    rows: torch.Tensor
    keys: torch.Tensor
    mask: Any
    part: Part
    sequence: int
    kv_batch: int = 0


def ahead(b, h, q_idx, kv_idx):
    return q_idx - kv_idx > -20


def bias_of(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[b, h, q_idx - kv_idx + 128]

    return score_mod


def temperature_of(temperature):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score * temperature[b, h] + temperature[0, 0] * torch.sigmoid(
            temperature[q_idx % 3, kv_idx % 5]
        )

    return score_mod


def whole_bias_of(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx, kv_idx]

    return score_mod


BIAS = (bias_of, lambda: torch.randn(6, HEADS + HEAD, 400, dtype=torch.float64))
TEMPERATURE = (temperature_of, lambda: torch.randn(6, HEADS + HEAD, dtype=torch.float64))

WHOLE_BIAS = (whole_bias_of, lambda: torch.randn(HEADS + HEAD, 77, 44, dtype=torch.float64))


def pieces_of(parts, masks, gap):
    found, at = [], [0, 0]
    for sequence, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        rows, keys = (torch.arange(start, start + n) for start, n in zip(at, part[:2], strict=True))
        found.append(Piece(rows, keys, mask, part, sequence))
        at = [at[0] + part.queries + gap, at[1] + part.keys + gap]
    return found


def attention_of(inputs, mask_mod, build, options=None):
    def attend(q, k, v, captures, _):
        return attention(q, k, v, build and build(*captures), mask_mod, SCALE, inputs, ALL)

    return interpret.compiled(attend, options=options)


def dense_of(pieces, build):
    def attend(q, k, v, captures, _):
        wide = score_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.size(-1))
        lse, max_scores = (q.new_full(q.shape[:3], -torch.inf, dtype=wide) for _ in range(2))
        for rows, keys, mask, part, sequence, kv_batch in pieces:
            at = slice(kv_batch, kv_batch + 1)
            mod = build and shifted(build(*captures), part, sequence)
            found = reference(q[:, :, rows], k[at, :, keys], v[at, :, keys], mod, mask, SCALE)
            for whole, part_of_it in zip((out, lse, max_scores), found, strict=True):
                whole[:, :, rows] = part_of_it.to(whole.dtype)
        return out, lse, max_scores

    return attend


def shifted(score_mod, part, sequence):
    def mod(score, b, h, q_idx, kv_idx):
        return score_mod(score, b + sequence, h + HEAD, q_idx + part.first_query, kv_idx + part.first_key)

    return mod


def tensors(rows, keys, dtype=torch.float32, kv_batch=1):
    generator = torch.Generator().manual_seed(0)
    shapes = (1, HEADS, rows, DIM), (kv_batch, KV_HEADS, keys, DIM), (kv_batch, KV_HEADS, keys, DIM + 4)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def lengths(parts, gap):
    return [sum(part[side] + gap for part in parts) for side in (0, 1)]


PARTS = [Part(20, 40), Part(1, 33), Part(17, 20, 60, 24)]
TWO_PASSES = ["forward", "backward_dq", "backward_dkdv"]
APART = ["forward", "backward_dq", "backward_dk", "backward_dv"]
CASES = {  # parts, mask_mod, blocks, mod, dtype, kinds
    "a bias": (PARTS, causal, (16, 32), BIAS, torch.float32, TWO_PASSES),
    "temperature": (PARTS, None, (64, 64), TEMPERATURE, torch.float16, TWO_PASSES),
    # The second part's rows in memory are far beyond its keys, which their indices are not.
    "whole tiles": ([Part(64, 1), Part(40, 50, 8, 10)], causal, (64, 128), None, torch.float32, TWO_PASSES),
    # Parts add to the same elements; beyond the queries of a tile there is no element to load.
    "apart": (PARTS, causal, (64, 32), WHOLE_BIAS, torch.float16, APART),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, "a bias", "apart"))
def test_packed_parts(case, kinds):
    parts, mask_mod, blocks, mod, dtype, expected = CASES[case]
    build, captures = (mod[0], (mod[1](),)) if mod else (None, ())
    inputs, masks = packed(mask_mod, parts, blocks, HEAD, gap=3)
    asked = {kind: {} for kind in ("forward", *expected)}
    attend = attention_of(inputs, mask_mod, build, {"configs": asked})
    with served_by("triton"):
        judge(
            attend, dense_of(pieces_of(parts, masks, 3), build), tensors(*lengths(parts, 3), dtype), captures
        )
    assert sorted(kinds) == sorted(expected)


def test_pages_and_nothing_but_what_tiles_hold():
    """Pages in another batch and out of order, a tile without queries, and NaN wherever nothing is held."""
    inputs, _ = packed(causal, [Part(40, 84, 56)], (16, 32), HEAD, scattered=True)
    queries, keys = (lines.clone() for lines in inputs.tile_map)
    order = torch.tensor([3, 0, 4])
    keys[:, BATCH], keys[:, ROW], queries[2, COUNT] = 1, order * 32, 0
    inputs = inputs._replace(tile_map=inputs.tile_map._replace(queries=queries, keys=keys))
    rows = torch.arange(32)
    held = torch.cat(
        [page * 32 + torch.arange(n) for page, n in zip(order.tolist(), (32, 32, 20), strict=True)]
    )
    mask = create_block_mask(lambda b, h, q, kv: q + 56 >= kv, None, None, 32, 84, "cpu")
    piece = Piece(rows, held, mask, Part(32, 84, 56), 0, kv_batch=1)
    query, *kv = tensors(40, 160, kv_batch=2)
    query[:, :, 32:] = torch.nan
    for tensor in kv:
        whole = torch.full_like(tensor, torch.nan)
        whole[1, :, held] = tensor[1, :, held]
        tensor.copy_(whole)
    with served_by("triton", "triton"):
        judge(attention_of(inputs, causal, bias_of), dense_of([piece], bias_of), (query, *kv), (BIAS[1](),))


@pytest.mark.parametrize("queries", slow_but([1, 16], 16))
def test_few_queries_of_many_sequences(queries, kinds):
    """All heads of a group in a tile, the keys of a sequence in two parts."""
    parts = [Part(1, 400, 399), Part(2, 40, 38), Part(1, 600, 599)]
    inputs, masks = packed(causal, parts, (queries, 32), HEAD, gap=3)
    given, pieces = tensors(*lengths(parts, 3)), pieces_of(parts, masks, 3)
    table = torch.randn(6, HEADS + HEAD, 800, dtype=torch.float64)
    with served_by("triton"), torch.no_grad():
        found = attention_of(inputs, causal, bias_of)(*given, (table.float(),), None)
    dense, names, wide = dense_of(pieces, bias_of), ("out", "lse", "max_scores"), [t.double() for t in given]
    with torch.no_grad():
        allowed = bounded(
            torch.float32,
            [table.float()],
            lambda captures, _: dict(zip(names, dense(*wide, captures, None), strict=True)),
        )
    assert_within(dict(zip(names, found, strict=True)), *allowed)
    assert kinds == ["decode", "combine"]


@pytest.mark.parametrize("lengths", [([20, 0, 40], [33, 9, 25]), ([1, 1], [40, 70])])
def test_packed_sequences(lengths, kinds):
    """Positions below 0 where queries are more than keys, and lines of the map that no tile needs."""
    sequences = Sequences.from_lengths(*lengths)
    decodes = sequences.max_q == 1
    mask = sequences.mask(ahead, block_size=None if decodes else (16, 32))

    def attend(q, k, v, table):
        def mod(score, b, h, q_idx, kv_idx):
            score = bias_of(table)(score, b, h, q_idx, kv_idx) + table[b, h, q_idx]
            return score + 0.01 * kv_idx * (q_idx // 3 + q_idx.abs() + q_idx.clamp(min=0) + q_idx % 5)

        return varlen_attention(q, k, v, sequences, mod, mask, enable_gqa=True)

    given = [x.squeeze(0).transpose(0, 1).requires_grad_(not decodes) for x in tensors(*map(sum, lengths))]
    table = torch.randn(3, HEADS, 400).requires_grad_(not decodes)
    with served_by("triton"):
        out = interpret.compiled(attend)(*given, table)
    wide = [x.detach().double().requires_grad_() for x in (*given, table)]
    want = attend(*wide)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    if not decodes:
        grads, wanted = (
            torch.autograd.grad(o.sin().sum(), x) for o, x in ((out, (*given, table)), (want, wide))
        )
        for got, expected in zip(grads, wanted, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    assert sorted(kinds) == (["decode"] if decodes else sorted(TWO_PASSES))


WINDOWS = {
    "window": (lambda b, h, q, kv: (q >= kv - 9) & (q - kv <= 20), TWO_PASSES),
    "chunks": (lambda b, h, q, kv: (q >= kv) & (q // 20 == kv // 20), TWO_PASSES),
    "prefix": (lambda b, h, q, kv: (q >= kv) | (kv < 35), TWO_PASSES),
}


@pytest.mark.parametrize("window", slow_but(WINDOWS, "prefix"))
def test_bounds_of_sequences_give_what_runs_give(window, kinds):
    mask_mod, expected = WINDOWS[window]
    sequences = Sequences.from_lengths([70, 0, 50], [60, 9, 130])
    mask = sequences.mask(mask_mod, block_size=(16, 32))
    asked = {kind: {} for kind in expected}
    given = [x.requires_grad_() for x in tensors(120, 199)]
    results = []
    for schedule in (mask.schedule, as_runs(mask.schedule, mask.tile_map)):
        decisions(clear=True)
        inputs = Inputs(schedule=schedule, tile_map=mask.tile_map)
        attend = attention_of(inputs, mask_mod, None, {"configs": asked})
        out, lse, _ = attend(*given, (), None)
        loss = out.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum()
        results.append([out, lse, *torch.autograd.grad(loss, given)])
        form = f" in {schedule.form} where a map says"
        assert [(d.chosen, d.call.endswith(form)) for d in decisions()] == [("triton", True)] * 2
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert sorted(kinds) == sorted(expected * 2)


@pytest.mark.parametrize("queries", [[1, 1], [3, 40]])
def test_pages_of_sequences(queries):
    """Out of order, with NaN behind the tokens that are used."""
    used, size = torch.tensor([40, 70], dtype=torch.int32), 16
    table = torch.tensor([[6, 2, 5, -9, -9], [0, 8, 1, 7, 3]], dtype=torch.int32)
    cu_q = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32)
    sequences = Sequences(cu_q, used_k=used, pages=table, page_size=size)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in tensors(sum(queries), 110))
    pools = [torch.full((9, size, *x.shape[1:]), torch.nan) for x in (k, v)]
    for pool, tokens in zip(pools, (k, v), strict=True):
        for pages, part in zip(table.tolist(), tokens.split(used.tolist()), strict=True):
            for page, chunk in zip(pages, part.split(size), strict=False):
                pool[page, : len(chunk)] = chunk
    mask = sequences.mask(causal)
    attend = interpret.compiled(
        lambda *given: varlen_attention(*given, sequences, None, mask, enable_gqa=True)
    )
    with served_by("triton"), torch.no_grad():
        out = attend(q, *pools)
    packed = Sequences.from_lengths(queries, used)
    want = varlen_attention(
        q.double(), k.double(), v.double(), packed, None, packed.mask(causal), enable_gqa=True
    )
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_other_tiles_do_not_compile_again():
    attend = interpret.compiled(lambda q, k, v, inputs: attention(q, k, v, None, causal, SCALE, inputs)[0])
    counts = []
    decisions(clear=True)
    for count in (2, 3, 5, 4):
        parts = [Part(20, 70, 50)] * count
        inputs, masks = packed(causal, parts, (16, 32))
        given = tensors(*lengths(parts, 0))
        want = dense_of(pieces_of(parts, masks, 0), None)(*given, (), None)[0]
        torch.testing.assert_close(attend(*given, inputs), want)
        counts.append(len(decisions()))
    assert counts == [1, 2, 2, 2] and {d.chosen for d in decisions()} == {"triton"}


@pytest.mark.parametrize("mod", slow_but([BIAS, TEMPERATURE], BIAS), ids=["units", "slots"])
def test_deterministic_gradients_of_captures(mod):
    build, captured = mod[0], mod[1]()
    inputs, masks = packed(causal, PARTS, (16, 32), HEAD, gap=3)
    given = tensors(*lengths(PARTS, 3))
    dense = dense_of(pieces_of(PARTS, masks, 3), build)

    def gradients(attend, dtype):
        query, key, value = (t.to(dtype) for t in given)
        wanted = query.requires_grad_(), captured.to(dtype).requires_grad_()
        out, lse, _ = attend(query, key, value, wanted[1:], None)
        loss = out.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum()
        names = ("d_query", "d_captures[0]", "d_value")  # whose size says how large sums are
        return dict(zip(names, (*torch.autograd.grad(loss, wanted), value), strict=True))

    torch.use_deterministic_algorithms(True)
    try:
        with served_by("triton", "triton"):
            found = gradients(attention_of(inputs, causal, build), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_accurate(
        found, *(gradients(dense, dtype) for dtype in (torch.float32, torch.float64)), torch.float32
    )


def test_deterministic_gradients_of_keys():
    inputs, masks = packed(causal, PARTS, (16, 32), HEAD, gap=3)
    torch.use_deterministic_algorithms(True)
    try:
        with served_by("triton", "triton"):
            dense = dense_of(pieces_of(PARTS, masks, 3), None)
            judge(attention_of(inputs, causal, None), dense, tensors(*lengths(PARTS, 3)), ())
    finally:
        torch.use_deterministic_algorithms(False)


def test_partial_output():
    """It is not rounded to fp16."""
    inputs, _ = packed(causal, PARTS, (16, 32), HEAD)
    rows = tensors(*lengths(PARTS, 0), torch.float16)
    attend = attention_of(inputs._replace(partial=True), causal, None)
    with torch.no_grad(), served_by("triton"):
        out, *_ = attend(*rows, (), None)
    gold, *_ = attention(*(t.double() for t in rows), None, causal, SCALE, inputs, ALL)
    assert out.dtype == torch.float32 and (out != out.half()).any()
    torch.testing.assert_close(out.double(), gold, rtol=2e-3, atol=2e-3)


def test_partial_gradients():
    """Those of stand-ins, as ranks add them up, are not rounded to fp16."""
    inputs, _ = packed(causal, PARTS, (16, 32), HEAD)
    table = BIAS[1]()

    def gradients(attend, dtype):
        query, *kv = (t.half().to(dtype) for t in tensors(*lengths(PARTS, 0)))
        wide = score_dtype(dtype)
        leaves = query, *(t.new_zeros((), dtype=wide).expand(t.shape) for t in kv), table.half().to(dtype)
        query, *stand_ins, biases = (leaf.requires_grad_() for leaf in leaves)
        out, lse = attend(query, *kv, biases, tuple(stand_ins))
        loss = out.to(wide).sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum()
        return torch.autograd.grad(loss, (query, *stand_ins, biases))

    def attend(q, k, v, table, stand_ins):
        # _replace fails in graphs of torch 2.11.
        given = Inputs(schedule=inputs.schedule, tile_map=inputs.tile_map, stand_ins=stand_ins)
        return attention(q, k, v, bias_of(table), causal, SCALE, given, ALL)[:2]

    with served_by("triton", "triton"):
        found = gradients(interpret.compiled(attend), torch.float16)
    assert [grad.dtype for grad in found] == [torch.float16, torch.float32, torch.float32, torch.float16]
    for grad, gold in zip(found, gradients(attend, torch.float64), strict=True):
        torch.testing.assert_close(grad.double(), gold, rtol=4e-3, atol=4e-3)
    assert all((grad != grad.half()).any() for grad in found[1:3])
