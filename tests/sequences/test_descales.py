"""FlashAttention's functions on numbers of 8 bits, against fp64 attention to what they stand for."""

import math

import pytest
import torch

from flex_inductor import FlexError
from flex_inductor.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

LENGTHS, KEYS, HEADS, KV_HEADS = [3, 9, 1], [20, 16, 5], 4, 2
E4M3 = torch.float8_e4m3fn


def descales():
    return {f"{name}_descale": torch.rand(3, KV_HEADS) + 0.5 for name in "qkv"}


def narrow(*shape, dtype=E4M3):
    return torch.randn(shape).to(dtype)


def exact(q, k, v, scales, i):
    """One sequence: [M, H, D], aligned at the end."""
    q, k, v = (
        t.double() * scales[f"{name}_descale"][i].double().unsqueeze(-1).repeat_interleave(times, 0)
        for name, t, times in (("q", q, HEADS // KV_HEADS), ("k", k, 1), ("v", v, 1))
    )
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.mT / math.sqrt(q.size(-1))
    rows, keys = scores.shape[1:]
    scores = scores.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def close(got, want):
    """Queries and outputs are bfloat16."""
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_padded(compile, dtype):
    q = narrow(3, 7, HEADS, 16, dtype=dtype)
    k, v = (narrow(3, 12, KV_HEADS, 16, dtype=dtype) for _ in range(2))
    scales = descales()
    run = torch.compile(flash_attn_func, backend="flex_inductor") if compile else flash_attn_func
    out = run(q, k, v, causal=True, **scales)
    for i in range(3):
        close(out[i], exact(q[i], k[i], v[i], scales, i))


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_packed_and_cached():
    q, scales = narrow(sum(LENGTHS), HEADS, 16), descales()
    k, v = (narrow(sum(KEYS), KV_HEADS, 16) for _ in range(2))
    want = torch.cat(
        [exact(*parts, scales, i) for i, parts in enumerate(zip(
            q.split(LENGTHS), k.split(KEYS), v.split(KEYS), strict=True
        ))]
    )  # fmt: skip
    starts = offsets(LENGTHS)
    close(flash_attn_varlen_func(q, k, v, starts, offsets(KEYS), 9, 20, causal=True, **scales), want)
    table = torch.tensor([[4, 1, 2], [0, 3, -1], [5, -1, -1]], dtype=torch.int32)
    pages = [torch.zeros(6, 8, KV_HEADS, 16).to(E4M3) for _ in range(2)]
    for cache, rows in zip(pages, (k, v), strict=True):
        for row, part in zip(table.tolist(), rows.split(KEYS), strict=True):
            for page, tokens in zip(row, part.split(8), strict=False):
                cache[page, : tokens.size(0)] = tokens
    used = torch.tensor(KEYS, dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 9, "block_table": table, "cache_seqlens": used}
    close(flash_attn_with_kvcache(q, *pages, causal=True, **given, **scales), want)
    # A query that is wider has no descale.
    wide = q.to(torch.bfloat16) * 0.5
    rest = {name: scale for name, scale in scales.items() if name != "q_descale"}
    halves = flash_attn_with_kvcache(wide, *pages, causal=True, **given, **rest)
    whole = scales | {"q_descale": torch.full((3, KV_HEADS), 0.5)}
    close(flash_attn_with_kvcache(q, *pages, causal=True, **given, **whole), halves.double())


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"q_descale": torch.ones(1, 4)},
            r"q_descale: expected a number for each sequence and KV head, \[1, 2\]",
        ),
        ({"k_descale": 2.0}, r"k_descale: expected a number .*, got a float\."),
    ],
)
def test_bad_input(given, said):
    q, k = narrow(1, 3, HEADS, 16), narrow(1, 3, KV_HEADS, 16)
    with pytest.raises(FlexError, match=said):
        flash_attn_func(q, k, k, **given)


def test_of_wide_tensors():
    q = torch.randn(1, 3, 2, 16)
    with pytest.raises(FlexError, match=r"v_descale: expected none for a tensor of torch\.float32"):
        flash_attn_func(q, q, q, v_descale=torch.ones(1, 2))
