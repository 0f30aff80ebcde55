"""New keys and values in caches: where they are written, how they are rotated, and that attention then reads them."""

import sys

import pytest
import torch
from torch._dynamo.utils import counters

from flex_inductor import Sequences, append_kv, varlen_attention
from flex_inductor.errors import FlexError
from flex_inductor.sequences import append
from tests.sequences.appended import DIM, HEADS, LENGTH, NEW, QUERY_HEADS, VALUE_DIM, case, expected, int32

KINDS = ("rows", "padding", "1", "3", "16", "64")
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
    torch.float8_e4m3fn: {"rtol": 2**-4, "atol": 2**-10},
}


def compare(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE[dtype])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_where_tokens_go(kind, interleaved):
    dtypes = {"1": torch.float64, "16": torch.bfloat16, "3": torch.float8_e4m3fn}
    dtype = dtypes.get(kind, torch.float32)
    given = case(kind, dtype)
    q, k, v = given.new
    turned = append_kv(*given.caches, k, v, given.sequences, given.rotary, interleaved=interleaved, q=q)
    compare([*given.caches, turned[: sum(NEW)]], expected(case(kind, dtype), True, interleaved), dtype)


def test_without_rotary():
    given = case("16")
    assert append_kv(*given.caches, *given.new[1:], given.sequences) is None
    for got, want in zip(given.caches, expected(case("16"), False, True), strict=False):
        assert torch.equal(got.double(), want)


def test_cards_without_triton(monkeypatch):
    """Torch's operations do it."""
    monkeypatch.setitem(sys.modules, "flex_inductor.sequences.append_kernel", None)
    append._on_cuda.cache_clear()
    try:
        assert append._on_cuda() is append._with_torch
    finally:
        append._on_cuda.cache_clear()


def test_a_step_in_one_graph():
    """Attention reads what was appended before it and not what is afterwards; nothing is copied, and other lengths do
    not compile again."""

    def step(k_cache, v_cache, q, k, v, sequences, rotary, mask):
        q = append_kv(k_cache, v_cache, k, v, sequences, rotary, q=q)
        before = varlen_attention(q, k_cache, v_cache, sequences, None, mask, enable_gqa=True)
        append_kv(k_cache, v_cache, k * 2, v * 2, sequences)
        return before, varlen_attention(q, k_cache, v_cache, sequences, None, mask, enable_gqa=True)

    counters.clear()
    compiled = torch.compile(step, backend="flex_inductor", fullgraph=True, dynamic=True)
    for shorter in (0, 1):
        results = []
        for run in (step, compiled):
            given = case("16")
            q, k, v = given.new
            given.sequences.used_k[1:].sub_(shorter)
            with torch.no_grad():
                mask = given.sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
                out = run(*given.caches, q, k, v, given.sequences, given.rotary, mask)
            results.append([*given.caches, *out])
            assert not torch.equal(*out)
        torch.testing.assert_close(*results)
    assert counters["stats"]["unique_graphs"] == 1
    missed = counters["inductor"]
    assert not any("missed" in name and count for name, count in missed.items()), missed


@pytest.mark.parametrize("kind", ["padding", "16"])
def test_what_is_copied_in_later_never_leads_out_of_the_cache(kind):
    """What lies outside is left out: all of memory around the cache keeps its value."""
    for used in ([400, -3, 2**31 - 1, -(2**31), 41], [2, 0, 0, 3, 0]):
        for lead in ("used_k", "cu_q", "table"):
            given = case(kind)
            whole = [torch.full((3 * len(x), *x.shape[1:]), torch.nan) for x in given.caches]
            inside = [x[len(x) // 3 : len(x) // 3 * 2] for x in whole]
            for cache in inside:
                cache.zero_()
            table = given.sequences.cache_rows if given.sequences.pages is None else given.sequences.pages
            if lead == "used_k":
                given.sequences.used_k.copy_(int32(used))
            elif lead == "cu_q":
                given.sequences.cu_q[1:].copy_(int32(used))
            else:
                table.copy_(
                    torch.tensor([99, -1, 10**6, -(10**6)])[torch.arange(table.numel()) % 4].view_as(table)
                )
            q, k, v = given.new
            append_kv(*inside, k, v, given.sequences, given.rotary, q=q)
            for cache, part in zip(whole, inside, strict=True):
                assert part.isfinite().all() and cache.isnan().sum() == cache.numel() // 3 * 2
                assert lead != "table" or not part.any()


@pytest.mark.parametrize("kind", ["rows", "16"])
def test_nothing_to_append_and_no_place_for_it(kind):
    given = case(kind)
    caches = [cache.clone() for cache in given.caches]
    none = Sequences(int32([0]), used_k=int32([]), max_k=1)
    without_pages = Sequences(
        int32([0, 1]), used_k=int32([0]), pages=int32([]).view(1, 0), page_size=caches[0].size(1)
    )
    for sequences in (none, without_pages):
        q = append_kv(*caches, *given.new[1:], sequences, given.rotary, q=given.new[0])
        assert q.shape == given.new[0].shape
    assert all(map(torch.equal, caches, given.caches))


def test_autograd_knows_that_a_cache_has_changed():
    given = case("rows")
    q = given.new[0].requires_grad_()
    out = varlen_attention(q, *given.caches, given.sequences, enable_gqa=True)
    append_kv(*given.caches, *given.new[1:], given.sequences)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_verified_values():
    """Under options={"verify": True}, of what was copied in after construction."""
    compiled = torch.compile(append_kv, backend="flex_inductor", options={"verify": True})
    for kind, change, text in (
        ("16", lambda s: s.used_k[3:4].fill_(49), "^used_k: sequence 3 uses 49 tokens of a room of 48"),
        ("16", lambda s: s.pages[3, 2:].fill_(15), "^pages: sequence 3 has page 15 at place 2 of its table; expected one of"),
        ("16", lambda s: s.pages[0, :1].fill_(-1), "^pages: sequence 0 has page -1 at place 0"),
        ("padding", lambda s: s.cache_rows[4:].fill_(7), "^cache_rows: sequence 4 is in row 7; expected one of the 7 rows"),
        ("padding", lambda s: s.left_pad_k[1:2].fill_(2), "^left_pad_k: sequence 1 has 2 tokens of padding and used_k is 1"),
    ):  # fmt: skip
        given = case(kind)
        change(given.sequences)
        before = [cache.clone() for cache in given.caches]
        with pytest.raises(FlexError, match=text):
            compiled(*given.caches, *given.new[1:], given.sequences)
        assert all(map(torch.equal, given.caches, before))


def refusals():
    shape, pages = (
        (3, LENGTH, HEADS),
        Sequences(int32([0, 2]), used_k=int32([5]), pages=int32([[0, 1]]), page_size=4),
    )
    rows = Sequences(int32([0, 2]), used_k=int32([5]), max_k=LENGTH)
    k, v, q = torch.zeros(2, HEADS, DIM), torch.zeros(2, HEADS, VALUE_DIM), torch.zeros(2, QUERY_HEADS, DIM)
    right = {
        "k_cache": torch.zeros(*shape, DIM),
        "v_cache": torch.zeros(*shape, VALUE_DIM),
        "k": k,
        "v": v,
        "sequences": rows,
    }
    cos = torch.ones(LENGTH, 4)
    yield right, {}, None
    yield right, {"rotary": (cos, cos), "q": q}, None
    yield (
        right,
        {"sequences": Sequences(int32([0, 2]))},
        "^sequences: have their keys packed; expected keys in a cache",
    )
    yield right, {"sequences": int32([0, 2])}, "^sequences: expected a flex_inductor.Sequences"
    yield right, {"v": None}, r"^v: expected a tensor \[tokens, heads, head_dim\] of new tokens, got None"
    yield (
        right,
        {"k": k[None]},
        r"^k: expected a tensor \[tokens, heads, head_dim\] .* of shape \[1, 2, 2, 12\]",
    )
    yield right, {"k_cache": k}, r"^k_cache: expected \[rows, length, heads, head_dim\] for these sequences"
    yield (
        right,
        {"k_cache": torch.zeros(3, 41, HEADS, DIM)},
        r"^v_cache: has shape \[3, 40, 2, 5\] and k_cache \[3, 41, 2, 12\]",
    )
    yield (
        right,
        {"k": k.double()},
        r"^k: expected torch.float32 of shape \[tokens, 2, 12\] for its cache, got a tensor .* torch.float64",
    )
    yield (
        right,
        {"v": torch.zeros(2, 1, VALUE_DIM)},
        r"^v: expected torch.float32 of shape \[tokens, 2, 5\] for its cache",
    )
    yield right, {"v": torch.zeros(3, HEADS, VALUE_DIM)}, "^v: has 3 tokens and k has 2; expected as many"
    yield right, {"k": k[:1], "v": v[:1]}, "^k: has 1 tokens, and the offsets end at 2"
    yield right, {"q": q}, r"^q: is given to be rotated, without rotary=\(cos, sin\)"
    yield (
        right,
        {"rotary": cos},
        r"^rotary: expected \(cos, sin\), two float tensors .* got a tensor of shape \[40, 4\]",
    )
    yield right, {"rotary": (cos, cos[:, 1:])}, r"^rotary: cos is a tensor of shape \[40, 4\] .* and sin"
    yield (
        right,
        {"rotary": (torch.ones(LENGTH, 7),) * 2},
        "^rotary: rotates 7 pairs, and heads have 12 dimensions; expected at most 6",
    )
    yield right, {"rotary": (cos[1:], cos[1:])}, "^rotary: has 39 positions, and sequences may have 40 tokens"
    yield right, {"rotary": (cos, cos), "q": q[..., 1:]}, "^q: has heads of 11 dimensions and k of 12"
    yield (
        right,
        {"k_cache": right["k_cache"][:0], "v_cache": right["v_cache"][:0]},
        "^k_cache: has 0 rows for 1 sequences",
    )
    yield right, {"sequences": pages}, "^k_cache: its pages have 40 tokens, and page_size is 4"
    yield (
        right,
        {"sequences": Sequences(int32([0, 2]), used_k=int32([41]))},
        "^k_cache: its rows have 40 tokens, and max_k is 41",
    )
    for name in ("k_cache", "v_cache", "k", "v"):
        yield (
            right,
            {name: right[name].clone().requires_grad_()},
            f"^{name}: requires grad, and there is no gradient through",
        )


@pytest.mark.parametrize("right, changed, text", [*refusals()])
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_calls(right, changed, text, compiled):
    run = torch.compile(append_kv, backend="eager", fullgraph=True) if compiled else append_kv
    if text is None:
        run(**right | changed)
        return
    with pytest.raises(FlexError, match=text):
        run(**right | changed)
