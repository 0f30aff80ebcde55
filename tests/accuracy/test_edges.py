"""Corner cases of meaning: what must not crash, what must not leak, what must be refused."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor import BlockMask, create_block_mask, flex_attention, supported
from flex_inductor.backend import flex_inductor
from flex_inductor.op.eager import tiles
from tests.support import (
    Sizes,
    attention_of,
    causal,
    dense_of,
    judge,
    of_converted_positions,
    run,
    served_by,
)

SMALL = Sizes(batch=1, heads=2, kv_heads=2, queries=24, keys=24, head_dim=8, value_dim=8)


class Way(NamedTuple):
    """How a call is made: eagerly, or compiled and then served by the route."""

    route: str | None
    dtype: torch.dtype

    def compiled(self, attend):
        return torch.compile(attend, backend=flex_inductor, fullgraph=True) if self.route else attend


EAGER, CHUNKED, FUSED = Way(None, torch.float64), Way("chunked", torch.float64), Way("cpu", torch.float32)


@pytest.fixture(params=[EAGER, CHUNKED, FUSED], ids=["eager", "chunked", "cpu"])
def way(request):
    torch._dynamo.reset()
    with served_by(request.param.route) if request.param.route else nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles each way, some of them fully masked."""
    monkeypatch.setattr(tiles, "MAX_CHUNK_KEYS", 7)
    monkeypatch.setattr(tiles, "MAX_CHUNK_QUERIES", 10)


def mask_of(mask_mod, sizes=SMALL, block=8) -> BlockMask:
    return create_block_mask(mask_mod, None, None, sizes.queries, sizes.keys, device="cpu", BLOCK_SIZE=block)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def test_masked_lanes_may_hold_any_index(way):
    """Lanes above the diagonal read far behind the end of `bias`, forward and backward."""
    bias = normal(SMALL.queries)

    def unsafe(bias):
        return lambda score, b, h, q_idx, kv_idx: (
            score + bias[torch.where(q_idx >= kv_idx, q_idx - kv_idx, 10**6)]
        )

    def safe(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[(q_idx - kv_idx).clamp(min=0)]

    inputs = SMALL.inputs(way.dtype)
    judge(way.compiled(attention_of(unsafe)), dense_of(safe), inputs, [bias], mask_of(causal))


def test_indices_of_64_bits(way):
    """In 32 they would wrap, and be another mask and another mod."""

    def build(scores):
        return lambda score, b, h, q_idx, kv_idx: score + scores[(kv_idx.long() * 3_000_000_001 + q_idx) % 7]

    mask = mask_of(
        lambda b, h, q_idx, kv_idx: (
            (kv_idx.long() * 3_000_000_000 <= q_idx.long() * 3_000_000_000) & (kv_idx.long() < 2**33)
        )
    )
    attend = way.compiled(attention_of(build))
    judge(attend, dense_of(build), SMALL.inputs(way.dtype), [normal(7)], mask)


@pytest.mark.parametrize("create", [create_block_mask, torch_create_block_mask])
def test_what_32_bits_may_not_hold_is_computed_in_64(create, way):
    """As torch does on a CPU, whoever made the mask."""

    def build():
        def score_mod(score, b, h, q_idx, kv_idx):
            large = kv_idx * 100_000_000
            return score + 0.1 * torch.clamp(large, 0, 8) + 1e-9 * large + (q_idx * -200_000_000) // 10**8

        return score_mod

    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx * 200_000_000 >= kv_idx * 199_000_000

    mask = create(mask_mod, None, None, SMALL.queries, SMALL.keys, device="cpu", BLOCK_SIZE=8)
    judge(way.compiled(attention_of(build)), dense_of(build), SMALL.inputs(way.dtype), block_mask=mask)


def test_positions_become_other_types(way):
    judge(
        way.compiled(attention_of(of_converted_positions)),
        dense_of(of_converted_positions),
        SMALL.inputs(way.dtype),
        [normal(128)],
        mask_of(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx - 2).bool()),
    )


def test_positions_are_rounded_to_16_bits(way):
    """Before torch 2.13 Inductor leaves the rounding out."""
    left_out = way.route is not None and supported.TORCH < (2, 13)

    def build(kept=torch.bfloat16):
        return lambda score, b, h, q_idx, kv_idx: (
            score + 0.01 * (q_idx * kv_idx * 30).to(kept).to(score.dtype)
        )

    def expected():
        return build(torch.float64 if left_out else torch.bfloat16)

    judge(way.compiled(attention_of(build)), dense_of(expected), SMALL.inputs(way.dtype))


def test_a_divisor_is_0_behind_the_last_key(way):
    """The last vector of 24 keys reaches beyond them."""

    def build():
        return lambda score, b, h, q_idx, kv_idx: score + 0.1 * (q_idx % (SMALL.keys - kv_idx))

    mask = mask_of(lambda b, h, q_idx, kv_idx: (q_idx - 30) % (kv_idx - SMALL.keys) > -9)
    judge(way.compiled(attention_of(build)), dense_of(build), SMALL.inputs(way.dtype), block_mask=mask)


def test_a_quotient_by_0_does_not_end_the_process():
    inputs = SMALL.inputs(FUSED.dtype)

    def attend(divisors):
        return flex_attention(
            *inputs, lambda score, b, h, q, kv: score + torch.div(kv, divisors[h], rounding_mode="trunc")
        )

    with served_by("cpu"):
        compiled = FUSED.compiled(attend)
        got, want = (compiled(torch.tensor(divisors))[:, 0] for divisors in ([2, 0], [2, 1]))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_mask_mod_reads_only_where_its_block_is_visited(way):
    """`visible` is too short for keys from 16 on, in blocks that are either whole or not visited."""
    visible = torch.arange(16) % 3 != 0
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([1, 0, 2], dtype=torch.int32)
    full = torch.tensor([2, 0, 1], dtype=torch.int32)

    def mask_with(mask_mod):
        row = (1, 1, 3, 3)
        return BlockMask.from_kv_blocks(
            counts, indices.expand(row), counts, full.expand(row), BLOCK_SIZE=8, mask_mod=mask_mod
        )

    unsafe = mask_with(lambda b, h, q_idx, kv_idx: visible[kv_idx])
    safe = mask_with(lambda b, h, q_idx, kv_idx: visible[kv_idx.clamp(max=15)])
    inputs = SMALL.inputs(way.dtype)
    judge(
        lambda *call: way.compiled(attention_of(None))(*call[:-1], unsafe), dense_of(None), inputs, (), safe
    )


def test_lists_with_room_for_what_they_hold(way):
    """As BlockMask.from_kv_blocks takes them from torch 2.14 on: two of the three blocks of a row."""
    window = mask_of(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 9))
    narrow = mask_of(window.mask_mod)
    used = torch.arange(2) < narrow.kv_num_blocks.unsqueeze(-1)
    narrow.kv_indices = torch.where(used, narrow.kv_indices[..., :2], 1000)
    narrow.full_kv_indices = narrow.full_kv_indices[..., :0]
    inputs = SMALL.inputs(way.dtype)
    judge(
        lambda *call: way.compiled(attention_of(None))(*call[:-1], narrow), dense_of(None), inputs, (), window
    )


# The CPU kernels leave a tensor without elements to the chunks.
@pytest.mark.parametrize(
    "way", [EAGER, CHUNKED, Way("chunked", torch.float32)], indirect=True, ids=["fp64", "chunked", "fp32"]
)
def test_empty_captures_in_a_fully_masked_call(way):
    nothing, inputs = torch.zeros(0, dtype=way.dtype), SMALL.inputs(way.dtype)
    never = mask_of(lambda b, h, q_idx, kv_idx: q_idx < -1)

    def build(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]

    ours = run(way.compiled(attention_of(build)), inputs, [nothing], never, allow_unused=False)
    assert (ours.out == 0).all() and (ours.lse == -math.inf).all() and (ours.d_query == 0).all()
    assert ours.d_captures[0].shape == (0,)


def test_live_out_of_range_raises(way):
    def build(bias):
        return lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]

    attend, short = way.compiled(attention_of(build)), (torch.zeros(SMALL.keys - 1, dtype=way.dtype),)
    for mask in (None, mask_of(causal)):
        # Kernels that Inductor generates raise RuntimeError, as its own indexing does.
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            attend(*SMALL.inputs(way.dtype), short, mask)


def test_negative_indices_wrap(way):
    def wrapping(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[-1 - h, kv_idx - q_idx]

    def plain(table):
        size = table.size(1)
        return lambda score, b, h, q_idx, kv_idx: score + table[1 - h, (kv_idx - q_idx + size) % size]

    table = normal(2, 2 * SMALL.keys)
    judge(way.compiled(attention_of(wrapping)), dense_of(plain), SMALL.inputs(way.dtype), [table])


LOOKUPS = {
    "embedding": lambda table, i: F.embedding(i, table.unsqueeze(1)).squeeze(-1),
    "embedding with padding": lambda table, i: F.embedding(i, table.unsqueeze(1), padding_idx=3)[0],
    "gather": lambda table, i: table.gather(0, i.long().reshape(1)).squeeze(0),
    "gather in two dimensions": lambda table, i: torch.gather(
        table.reshape(2, -1), 1, i.long().reshape(1, 1) // 2
    ).reshape(()),
    "take": lambda table, i: torch.take(table, i.long()),
    "index_select": lambda table, i: table.index_select(0, i)[0],
    "take of two": lambda table, i: table.take(torch.stack([i, i // 2]).long()).sum(),
}
INDEXED = {
    "embedding": lambda table, i: table[i],
    "embedding with padding": lambda table, i: torch.where(i == 3, table.detach()[i], table[i]),
    "gather": lambda table, i: table[i],
    "gather in two dimensions": lambda table, i: table[i // 2],
    "take": lambda table, i: table[i],
    "index_select": lambda table, i: table[i],
    "take of two": lambda table, i: table[i] + table[i // 2],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_other_ways_to_look_up(name):
    """They give what indexing gives, and are guarded as it is."""

    def unsafe(table):
        def mod(score, b, h, q_idx, kv_idx):
            return score + LOOKUPS[name](table, torch.where(q_idx >= kv_idx, q_idx - kv_idx, 10**6))

        return mod

    def safe(table):
        return lambda score, b, h, q_idx, kv_idx: score + INDEXED[name](table, (q_idx - kv_idx).clamp(min=0))

    inputs, table = SMALL.inputs(torch.float64), normal(SMALL.keys)
    judge(attention_of(unsafe), dense_of(safe), inputs, [table], mask_of(causal))


@pytest.mark.parametrize(
    "way, names",
    [(CHUNKED, ["embedding", "take"]), (FUSED, ["take"])],
    indirect=["way"],
    ids=["chunked", "cpu"],
)
def test_other_ways_to_look_up_compiled(way, names):
    def unsafe(table):
        def mod(score, b, h, q_idx, kv_idx):
            i = torch.where(q_idx >= kv_idx, q_idx - kv_idx, 10**6)
            found = 1.0
            for name in names:
                found = found * LOOKUPS[name](table, i)
            return score + found

        return mod

    def safe(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[(q_idx - kv_idx).clamp(min=0)] ** len(names)

    inputs, table = SMALL.inputs(way.dtype), normal(SMALL.keys)
    judge(way.compiled(attention_of(unsafe)), dense_of(safe), inputs, [table], mask_of(causal))


def rows_with_nan(tensor) -> set[int]:
    return set(tensor.isnan().any(-1).any(0).any(0).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    "where, out, d_query, d_key, d_value",
    [
        ("query", {9}, {9}, range(10), range(10)),
        # A NaN key or value reaches the queries that attend it, and through their gradients what they attend.
        ("key", range(9, 24), range(9, 24), range(24), range(24)),
        ("value", range(9, 24), range(9, 24), range(24), ()),
        ("upstream", (), {9}, range(10), range(10)),
    ],
)
def test_nan_stays_where_it_belongs(where, out, d_query, d_key, d_value):
    """Causal: query 9 attends keys 0 to 9, and key 9 is attended by queries from 9 on."""
    inputs = dict(zip(("query", "key", "value"), SMALL.inputs(torch.float64), strict=True))
    inputs["upstream"] = torch.ones_like(inputs["value"])
    inputs[where][:, :, 9] = math.nan
    *inputs, upstream = inputs.values()
    inputs = [t.requires_grad_() for t in inputs]
    result = flex_attention(*inputs, block_mask=mask_of(causal))
    grads = torch.autograd.grad(result, inputs, upstream)
    got = [rows_with_nan(t) for t in (result, *grads)]
    assert got == [set(rows) for rows in (out, d_query, d_key, d_value)]


def test_garbage_behind_the_mask_changes_nothing():
    """NaN and infinity in keys, values and queries that no live lane touches."""
    inputs = SMALL.inputs(torch.float64)
    short = mask_of(lambda b, h, q_idx, kv_idx: (q_idx < 18) & (kv_idx < 18))
    garbage = [t.clone() for t in inputs]
    for t in garbage:
        t[:, :, 18:21] = math.nan
        t[:, :, 21:] = -math.inf
    clean, dirty = (run(attention_of(None), given, (), short) for given in (inputs, garbage))
    for name, want in clean.named().items():
        assert torch.equal(dirty.named()[name], want), name


def test_infinite_values_reach_the_rows_that_attend_them():
    inputs = SMALL.inputs(torch.float64)
    inputs[2][:, :, 9] = math.inf
    inputs[2][:, :, 12] = -math.inf
    out = flex_attention(*inputs, block_mask=mask_of(causal))
    assert out[:, :, :9].isfinite().all()
    assert (out[:, :, 9:12] == math.inf).all()
    assert out[:, :, 12:].isnan().all()


def test_infinite_score(way):
    """A score of +inf makes its row NaN, as softmax does, with its logsumexp, and no other row."""

    def build():
        return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx == 3) & (kv_idx == 1), math.inf, score)

    ours = judge(way.compiled(attention_of(build)), dense_of(build), SMALL.inputs(way.dtype))
    assert all(rows_with_nan(t) == {3} for t in (ours.out, ours.lse.unsqueeze(-1), ours.d_query))
    assert (ours.max_scores[:, :, 3] == math.inf).all()


def assert_dead(result, rows, keys):
    """Nothing comes out of `rows` and nothing goes back into `keys`."""
    assert (result.out[:, :, rows] == 0).all()
    assert (result.lse[:, :, rows] == -math.inf).all() and (result.max_scores[:, :, rows] == -math.inf).all()
    assert (result.d_query[:, :, rows] == 0).all()
    assert (result.d_key[:, :, keys] == 0).all() and (result.d_value[:, :, keys] == 0).all()


def test_row_that_score_mod_kills(way):
    def build(bias):
        def mod(score, b, h, q_idx, kv_idx):
            return torch.where((q_idx < 5) | (kv_idx >= 20), -math.inf, score + bias[q_idx])

        return mod

    inputs, bias = SMALL.inputs(way.dtype), normal(SMALL.queries)
    result = judge(way.compiled(attention_of(build)), dense_of(build), inputs, [bias])
    assert_dead(result, slice(0, 5), slice(20, None))
    assert (result.d_captures[0][:5] == 0).all()


def test_rows_that_the_mask_kills(way):
    mask = mask_of(lambda b, h, q_idx, kv_idx: (q_idx >= 5) & (kv_idx < 20))

    def build(bias):
        return lambda score, b, h, q_idx, kv_idx: score * bias[q_idx]

    inputs, bias = SMALL.inputs(way.dtype), normal(SMALL.queries)
    result = judge(way.compiled(attention_of(build)), dense_of(build), inputs, [bias], mask)
    assert_dead(result, slice(0, 5), slice(20, None))
    assert (result.d_captures[0][:5] == 0).all()


def test_gradient_of_lse_alone(way):
    inputs = [t.requires_grad_() for t in SMALL.inputs(way.dtype)]
    grads, gold = (
        torch.autograd.grad(f(*given, (), mask_of(causal))[1].square().sum(), given[:2])
        for f, given in (
            (way.compiled(attention_of(None)), inputs),
            (dense_of(None), [t.detach().double().requires_grad_() for t in inputs]),
        )
    )
    few = 1e-12 if way.dtype == torch.float64 else 1e-5
    for got, want in zip(grads, gold, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=few, atol=few)


EMPTY = {
    "B": SMALL._replace(batch=0, kv_batch=0),
    "S": SMALL._replace(queries=0),
    "KV": SMALL._replace(keys=0),
    "S and KV": SMALL._replace(queries=0, keys=0),
    "B but not KV's": SMALL._replace(batch=0, kv_batch=1),
}


@pytest.mark.parametrize(
    "way, empty",
    [
        pytest.param(
            way,
            empty,
            marks=pytest.mark.slow if way is FUSED and len(empty) > 2 else (),
            id=f"{name}-{empty}",
        )
        for name, way in (("eager", EAGER), ("chunked", CHUNKED), ("cpu", FUSED))
        for empty in EMPTY
    ],
    indirect=["way"],
)
def test_zero_lengths(empty, way):
    sizes = EMPTY[empty]

    def build(bias):
        return lambda score, b, h, q_idx, kv_idx: score + (bias.exp() * 2).sum() * h

    attend, captures = way.compiled(attention_of(build)), [torch.ones(3, dtype=way.dtype)]
    ours = run(attend, sizes.inputs(way.dtype), captures, None, allow_unused=False)
    assert ours.out.shape == (sizes.batch, sizes.heads, sizes.queries, sizes.value_dim)
    assert (ours.out == 0).all() and (ours.lse == -math.inf).all()
    for grad in (*ours[3:6], ours.d_captures[0]):
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_runs_once_is_rounded_as_torch_rounds_it(dtype):
    """All that a score of it is off by: half a unit of exp's result, in the lse as well."""
    attend = torch.compile(
        attention_of(lambda by_key: lambda score, b, h, q_idx, kv_idx: by_key.exp()[kv_idx]),
        backend="flex_inductor",
        fullgraph=True,
    )
    inputs = Sizes().inputs(dtype)
    with served_by("cpu"), torch.no_grad():
        for seed in range(8):
            by_key = torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(dtype)
            _, lse, max_scores = attend(*inputs, (by_key,), None)
            scores = by_key.exp().float()
            assert (max_scores == scores.max()).all()
            torch.testing.assert_close(lse, scores.logsumexp(0).expand_as(lse), rtol=1e-6, atol=0)


def test_no_heads_and_no_columns():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    for attend in (flex_attention, torch.compile(flex_attention, backend="flex_inductor")):
        no_heads = query[:, :0]
        assert attend(no_heads, no_heads, no_heads).shape == (1, 0, 5, 8)
        mean = attend(query[..., :0], query[..., :0], query)  # all scores are 0
        torch.testing.assert_close(mean, query.mean(2, keepdim=True).expand_as(query))
        assert attend(query, query, query[..., :0]).shape == (1, 2, 5, 0)
