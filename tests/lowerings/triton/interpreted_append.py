"""The Triton kernel of append_kv, in Triton's interpreter. See test_interpreted.py."""

import contextlib
import dataclasses

import pytest
import torch
from support import served_by

from flex_inductor.flash import flash_attn_with_kvcache
from flex_inductor.sequences import append_kernel
from flex_inductor.tools import interpret
from tests.sequences.appended import NEW, case, expected, int32

interpret.prepare(vars(append_kernel))

KINDS = {
    "rows": torch.float64,
    "padding": torch.float32,
    "1": torch.float16,
    "16": torch.float32,
    "3": torch.float8_e4m3fn,
}
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.float8_e4m3fn: 2**-4}


def run(given, rotary=True, interleaved=True, q_starts=None, q_moves=True):
    own, (q, k, v) = given.sequences, given.new
    cos, sin = given.rotary if rotary else (None, None)
    return append_kernel.launch(
        *given.caches, k, v, q if rotary else None, cos, sin, own.cu_q, q_starts, own.used_q, own.used_k,
        own.left_pad_k, own.cache_rows, own.pages, interleaved, q_moves,
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_where_tokens_go(kind, interleaved):
    given = case(kind, KINDS[kind])
    turned = run(given, True, interleaved)
    wanted = expected(case(kind, KINDS[kind]), True, interleaved)
    for got, want in zip([*given.caches, turned[: sum(NEW)]], wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=CLOSE[got.dtype], atol=CLOSE[got.dtype])


def test_without_rotary_and_of_other_layouts():
    given = case("16")
    caches = [given.caches[0].transpose(1, 2).contiguous().transpose(1, 2), given.caches[1]]
    wide = [torch.stack([x, x * torch.nan], -1)[..., 0] for x in given.new]
    given = given._replace(caches=caches, new=wide)
    assert run(given, rotary=False).numel() == 0
    for got, want in zip(given.caches, expected(case("16"), False, True), strict=False):
        assert torch.equal(got.double(), want)


@pytest.mark.parametrize("q_moves", [False, True])
def test_other_queries_than_keys(q_moves):
    """As torch operations do it; each sequence has two queries."""
    found = []
    for launched in (run, on_cpu):
        given = case("padding")
        queries = given._replace(new=[given.new[0][:10], *given.new[1:]])
        found.append([launched(queries, q_starts=int32([0, 2, 4, 6, 8, 10]), q_moves=q_moves), *given.caches])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_a_query_of_another_dtype(kind, dtype):
    """It stays what it is, and neither side is rotated more coarsely than alone."""
    found = []
    for launched in (run, on_cpu):
        given = case("rows", kind)
        q, k, v = given.new
        given = given._replace(new=[q.to(dtype) / 3, k, v])
        found.append([launched(given)[: sum(NEW)], *given.caches])
    close = 1e-14 if dtype == torch.float64 else 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=close, atol=close)
    coarse = 2**-3 if kind == torch.float8_e4m3fn else 2e-3
    for got, want in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=coarse, atol=1e-6)


def test_every_number_of_8_bits():
    """By an angle of 0 that shrinks or grows it: rounded, and beyond the largest number is the largest."""
    bits = torch.arange(256)
    bits = torch.cat([bits[bits % 128 != 127], torch.tensor([127, 255])]).to(torch.uint8)  # a pair is NaN
    given = case("rows", torch.float8_e4m3fn)
    numbers = torch.nn.functional.pad(bits, (0, 56)).view(torch.float8_e4m3fn).view(13, 2, 12)
    for factor in (1, 0.3, -7):
        rotary = torch.full((80, 6), float(factor)), torch.zeros(80, 6)
        found = run(given._replace(new=[numbers, *given.new[1:]], rotary=rotary))
        want = (numbers.float() * factor).clamp(-448, 448).to(numbers.dtype)
        torch.testing.assert_close(found.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def on_cpu(given, q_starts=None, q_moves=True):
    own, (q, k, v) = given.sequences, given.new
    return torch.ops.flex_inductor.append_kv(
        *given.caches, k, v, q, *given.rotary, own.cu_q, q_starts, own.used_q, own.used_k,
        own.left_pad_k, own.cache_rows, own.pages, True, q_moves,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["padding", "16"])
def test_what_is_copied_in_later_never_leads_out_of_the_cache(kind):
    for lead in ("used_k", "cu_q", "table"):
        given = case(kind)
        whole = [torch.full((3 * len(x), *x.shape[1:]), torch.nan) for x in given.caches]
        inside = [x[len(x) // 3 : len(x) // 3 * 2].zero_() for x in whole]
        table = given.sequences.cache_rows if given.sequences.pages is None else given.sequences.pages
        if lead == "table":
            table.copy_(
                torch.tensor([99, -1, 10**6, -(10**6)])[torch.arange(table.numel()) % 4].view_as(table)
            )
        else:
            target = given.sequences.used_k if lead == "used_k" else given.sequences.cu_q[1:]
            target.copy_(int32([400, -3, 2**31 - 1, -(2**31), 41]))
        run(given._replace(caches=inside))
        for cache, part in zip(whole, inside, strict=True):
            assert part.isfinite().all() and cache.isnan().sum() == cache.numel() // 3 * 2
            assert lead != "table" or not part.any()


def test_no_place_for_any():
    given = case("16")
    before = [cache.clone() for cache in given.caches]
    none = dataclasses.replace(
        given.sequences, used_k=int32([0] * 5), pages=torch.empty(5, 0, dtype=torch.int32)
    )
    assert run(given._replace(sequences=none)).shape == given.new[0].shape
    assert all(map(torch.equal, given.caches, before))


def test_a_step_with_a_cache(kinds):
    """New keys, rotary and attention to pages by the kernels for few queries, in as many parts as asked for."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, k_cache, v_cache = (
        torch.randn(shape, generator=generator)
        for shape in ((2, 1, 4, 16), *[(2, 1, 2, 16)] * 2, *[(9, 16, 2, 16)] * 2)
    )
    angle = torch.randn(64, 4, generator=generator)
    given = {
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
        "cache_seqlens": int32([39, 7]),
        "block_table": int32([[6, 2, 5, 0], [1, 8, 7, 3]]),
        "causal": True,
        "softcap": 3.0,
        "num_splits": 2,
        "return_softmax_lse": True,
    }
    found = []
    for run, dtype in (
        (interpret.compiled(flash_attn_with_kvcache), torch.float32),
        (flash_attn_with_kvcache, torch.float64),
    ):
        caches = [x.to(dtype) for x in (k_cache, v_cache)]
        with torch.no_grad(), served_by("triton") if dtype == torch.float32 else contextlib.nullcontext():
            found.append([*run(q.to(dtype), *caches, k.to(dtype), v.to(dtype), **given), *caches])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)
    assert kinds == ["decode", "combine"]
