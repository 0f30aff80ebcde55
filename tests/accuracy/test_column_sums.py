"""How much each key is attended to: the sums of the softmax's columns, by each door and route."""

import functools
import itertools
import math

import pytest
import torch
from support import LAYOUTS, MODS, Sizes, and_sinks, logits, served_by

from flex_inductor import (
    AuxRequest,
    Sequences,
    create_block_mask,
    decisions,
    flex_attention,
    varlen_attention,
)

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=60, keys=70)
REQUEST = AuxRequest(column_sums=True)
compiled = functools.partial(torch.compile, backend="flex_inductor", dynamic=False)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx + 3


def of_weights(weights, kv_heads):
    """Weights [B, H, M, N] of the heads that share a KV head, as sums [B, K, N]."""
    return weights.sum(2).unflatten(1, (kv_heads, -1)).sum(2)


def biased(run, dtype=torch.float32, sizes=SIZES, layout="contiguous", **given):
    """With a mod, a mask, rows that see nothing, a sink, and dropout, which has no part in it."""
    query, key, value = map(LAYOUTS[layout], sizes.inputs(dtype))
    captures = MODS["relative_bias"].captures(sizes)
    mask = create_block_mask(causal, None, None, sizes.queries, sizes.keys)
    sinks = torch.randn(4)

    def call(query, key, value, sinks, *captures):
        mod = MODS["relative_bias"].build(*captures)
        options = {"enable_gqa": True, "return_aux": REQUEST, "sinks": sinks, "dropout_p": 0.3, **given}
        return flex_attention(query, key, value, mod, mask, **options)

    _, aux = run(call)(query, key, value, sinks, *captures)
    scores = logits(MODS["relative_bias"].build, query.double(), key.double(), captures, mask)
    weights = and_sinks(scores, sinks).softmax(-1)[..., :-1]
    want = of_weights(weights, 2).float()
    assert aux.column_sums.dtype == torch.float32 and not aux.column_sums.requires_grad
    limit = 1e-5 if dtype == torch.float32 else 0.02
    want = want if sizes.kv_batch is None else want.sum(0, keepdim=True)
    torch.testing.assert_close(aux.column_sums, want, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_all_that_there_is(dtype):
    biased(lambda call: call, dtype)
    with served_by("cpu", "cpu"):
        biased(functools.partial(compiled, options={"verify": True}), dtype)
    with served_by("chunked", "chunked"):
        biased(functools.partial(compiled, options={"route": "chunked"}), dtype)


FEW = Sizes(batch=3, heads=4, kv_heads=2, queries=5, keys=300)


@pytest.mark.parametrize(
    "sizes, layout, dtype",
    [
        (FEW, "contiguous", torch.float32),
        (FEW, "bshd", torch.bfloat16),  # its KV heads are read together
        (FEW._replace(kv_batch=1), "head_dim_slice", torch.float32),
    ],
)
def test_of_few_queries(sizes, layout, dtype):
    """One kernel gives the output and the sums."""
    with served_by("cpu"):
        biased(compiled, dtype, sizes, layout, dropout_p=0.0)
    assert [kernel.kernel for kernel in decisions()[0].kernels] == ["decode"]
    biased(lambda call: call, dtype, sizes, layout, dropout_p=0.0)


def test_of_pages_that_sequences_share():
    """Decoding behind a common prefix: its tokens have the weights of all sequences."""
    query, paged = torch.randn(2, 4, 16), torch.randn(4, 16, 2, 16)
    pages = torch.tensor([[3, 0], [3, 2]], dtype=torch.int32)
    sequences = Sequences(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        used_k=torch.tensor([20, 30], dtype=torch.int32),
        pages=pages,
        page_size=16,
    )
    mask = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)

    def call(query, key):
        return varlen_attention(
            query, key, key, sequences, block_mask=mask, enable_gqa=True, return_aux=REQUEST
        )

    want = torch.zeros(64, 2)
    for row, table, used in zip(query, pages, (20, 30), strict=True):
        places = (16 * table[:, None] + torch.arange(16)).flatten()[:used]
        keys = paged.flatten(0, 1)[places].permute(1, 2, 0)
        weights = (row.view(2, 2, 16) @ keys / 4).softmax(-1)  # [K, G, N]
        want[places] += weights.sum(1).T
    for run in (compiled, lambda call: call):
        torch.testing.assert_close(run(call)(query, paged)[1].column_sums.flatten(0, 1), want)


@pytest.mark.parametrize("lengths", [[3, 1, 9], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_packed_cached_and_paged(compile, lengths):
    """Tokens that no sequence has, or uses, have nothing."""
    run = compiled if compile else lambda call: call
    keys = [20, 16, 25]
    query = torch.randn(sum(lengths), 4, 16)
    packed = torch.randn(70, 2, 16)
    whole = torch.full((3, 32, 2, 16), math.nan)
    for i, part in enumerate(packed[:61].split(keys)):
        whole[i, : keys[i]] = part
    pages = torch.tensor([[5, 0], [1, -1], [3, 2]], dtype=torch.int32)
    paged = torch.full((7, 16, 2, 16), math.nan)
    for i, row in enumerate(pages):
        for j, page in enumerate(row):
            if page >= 0:
                paged[page] = whole[i, 16 * j : 16 * j + 16]
    cu_q = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    used = torch.tensor(keys, dtype=torch.int32)
    doors = {
        "packed": (packed, Sequences.from_lengths(lengths, keys)),
        "cached": (whole, Sequences(cu_q, used_k=used)),
        "paged": (paged, Sequences(cu_q, used_k=used, pages=pages, page_size=16)),
    }
    found = {}
    for name, (key, sequences) in doors.items():
        mask = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)

        def call(query, key, sequences, mask):
            given = {"block_mask": mask, "enable_gqa": True, "return_aux": REQUEST}
            return varlen_attention(query, key, key, sequences, **given)[1].column_sums

        found[name] = run(call)(query, key, sequences, mask)
        assert found[name].shape == key.shape[:-1]
    want = torch.zeros(70, 2)
    q0 = k0 = 0
    for rows, count in zip(lengths, keys, strict=True):
        q, k = query[q0 : q0 + rows].transpose(0, 1), packed[k0 : k0 + count].permute(1, 2, 0)
        scores = q @ k.repeat_interleave(2, 0) / 4
        scores = scores.masked_fill(torch.ones(rows, count).triu(count - rows + 1).bool(), -math.inf)
        want[k0 : k0 + count] = of_weights(scores.softmax(-1)[None], 2)[0].T
        q0, k0 = q0 + rows, k0 + count
    torch.testing.assert_close(found["packed"], want)
    for i, part in enumerate(want[:61].split(keys)):
        torch.testing.assert_close(found["cached"][i, : keys[i]], part)
        assert not found["cached"][i, keys[i] :].any()
        in_pages = found["paged"][pages[i].clamp(min=0)].flatten(0, 1)
        torch.testing.assert_close(in_pages[: keys[i]], part)
    assert not found["paged"][[4, 6]].any()


def test_nested_vmapped_and_narrow():
    parts = [torch.randn(5, 2, 16), torch.randn(9, 2, 16)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    _, aux = flex_attention(nested, nested, nested, return_aux=REQUEST)
    for sums, part in zip(aux.column_sums.unbind(), parts, strict=True):
        one = part.transpose(0, 1)[None]
        _, alone = flex_attention(one, one, one, return_aux=REQUEST)
        torch.testing.assert_close(sums, alone.column_sums[0])
    query = torch.randn(3, 1, 2, 20, 16)

    def sums_of(query):
        return flex_attention(query, query, query, return_aux=REQUEST)[1].column_sums

    want = torch.stack([sums_of(one) for one in query])
    torch.testing.assert_close(torch.vmap(sums_of)(query), want)
    narrow, scale = query[0].to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]])
    _, aux = flex_attention(query[0], narrow, narrow, k_scale=scale, return_aux=REQUEST)
    wide = narrow.float() * scale[..., None, None]
    _, of_wide = flex_attention(query[0], wide, wide, return_aux=REQUEST)
    torch.testing.assert_close(aux.column_sums, of_wide.column_sums)


def test_of_nothing():
    query, none = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 0, 16)
    assert flex_attention(query, none, none, return_aux=REQUEST)[1].column_sums.shape == (1, 2, 0)
    assert flex_attention(none, query, query, return_aux=REQUEST)[1].column_sums.tolist() == [[[0.0] * 4] * 2]
