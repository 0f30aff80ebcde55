"""FlashAttention's functions against what its documentation says, written out densely."""

import pytest
import torch
from support import served_by
from torch._dynamo.testing import CompileCounterWithBackend

from flex_inductor import flash
from flex_inductor.errors import FlexError
from tests.sequences.flash_dense import dense

HEADS, KV_HEADS, DIM, BATCH = 4, 2, 8, 2
CASES = {  # queries, keys, the arguments
    "plain": (7, 12, {}),
    "causal": (7, 12, {"causal": True}),
    "causal, longer queries": (12, 7, {"causal": True}),
    "decode": (1, 30, {"causal": True, "alibi_slopes": True}),
    "window": (20, 25, {"window_size": (4, 2)}),
    "window without end": (12, 7, {"window_size": (2**31 - 1, 2**31 - 1)}),
    "left window": (20, 20, {"window_size": (4, -1), "softcap": 3.0}),
    "causal window": (20, 25, {"causal": True, "window_size": (5, 9), "softmax_scale": 0.7}),
    "softcap and alibi": (9, 15, {"softcap": 2.0, "alibi_slopes": True, "causal": True}),
    "alibi of each batch": (9, 5, {"alibi_slopes": "batch"}),
}


def given(queries, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, queries, HEADS, DIM), *[(BATCH, keys, KV_HEADS, DIM)] * 2
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes
    ]


def with_slopes(arguments):
    shape = {True: (HEADS,), "batch": (BATCH, HEADS)}.get(arguments.get("alibi_slopes"))
    if shape is None:
        return arguments
    slopes = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {**arguments, "alibi_slopes": slopes}


def same(found, wanted, leaves, **close):
    torch.testing.assert_close(found, wanted, **close)
    losses = (out.sin().sum() + lse.clamp(min=-9).cos().sum() for out, lse in (found, wanted))
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses), **close)


@pytest.mark.parametrize("case", CASES)
def test_flash_attn_func(case):
    queries, keys, arguments = CASES[case]
    leaves, arguments = given(queries, keys), with_slopes(arguments)
    out, lse, probabilities = flash.flash_attn_func(*leaves, **arguments, return_attn_probs=True)
    assert probabilities is None
    same((out, lse), dense(*leaves, **arguments), leaves)
    assert torch.equal(flash.flash_attn_func(*leaves, **arguments), out)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_flash_attn_varlen_func(case, paged):
    """Two sequences: the case's, and one of 5 queries and 9 keys."""
    queries, keys, arguments = CASES[case]
    arguments = with_slopes(arguments)
    parts = [[x[:1] for x in given(queries, keys)], [x[1:] for x in given(5, 9)]]
    q, k, v = (torch.cat([part[i][0] for part in parts]).detach().requires_grad_() for i in range(3))
    cu_q, cu_k = (torch.tensor([0, n, n + m], dtype=torch.int32) for n, m in ((queries, 5), (keys, 9)))
    sides = {"block_table": None}
    kv = (k, v)
    if paged:  # the pages of both lie one after the other, turned around
        table = torch.arange(16, dtype=torch.int32).view(2, 8).flip(1)
        sides["block_table"], kv = table, []
        for packed in (k, v):
            pool = torch.zeros(16, 4, KV_HEADS, DIM, dtype=torch.float64)
            for n, (start, stop) in enumerate(((0, keys), (keys, keys + 9))):
                for place, chunk in enumerate(packed[start:stop].detach().split(4)):
                    pool[table[n, place], : len(chunk)] = chunk
            kv.append(pool)
    out, lse, _ = flash.flash_attn_varlen_func(
        q, *kv, cu_q, cu_k, max(queries, 5), max(keys, 9), **arguments, **sides, return_attn_probs=True
    )
    wanted = []
    for n in range(2):
        own = [
            x[None, a:b]
            for x, (a, b) in zip((q, k, v), (cu_q[n : n + 2], cu_k[n : n + 2], cu_k[n : n + 2]), strict=True)
        ]
        slopes = arguments.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[n]
        wanted.append(dense(*own, **{**arguments, "alibi_slopes": slopes}))
    wanted = torch.cat([w[0][0] for w in wanted]), torch.cat([w[1][0] for w in wanted], 1)
    same((out, lse), wanted, [q] if paged else [q, k, v])


def test_packed_forms():
    q, k, v = given(6, 6)
    k, v = (torch.cat([x, x], 2) for x in (k, v))
    expected = flash.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), expected)
    assert torch.equal(flash.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), expected)
    cu, flat = torch.tensor([0, 6, 12], dtype=torch.int32), [x.flatten(0, 1) for x in (q, k, v)]
    expected = flash.flash_attn_varlen_func(*flat, cu, cu, 6, 6, causal=True)
    packed = flash.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), cu, 6, causal=True)
    assert torch.equal(packed, expected)
    packed = flash.flash_attn_varlen_kvpacked_func(
        flat[0], torch.stack(flat[1:], 1), cu, cu, 6, 6, causal=True
    )
    assert torch.equal(packed, expected)


def test_mods_see_positions_aligned_at_the_end():
    leaves = given(5, 12)
    table = torch.randn(12, 12, dtype=torch.float64, requires_grad=True)
    found = flash.flash_attn_func(
        *leaves,
        window_size=(6, 0),
        return_attn_probs=True,
        score_mod=lambda score, b, h, i, j: score + table[i, j],
        mask_mod=lambda b, h, i, j: (i + j) % 3 != 0,
    )
    bias = table[torch.arange(5)[:, None] + 7, torch.arange(12)]
    q, k, v = leaves
    plain = dense(q, k, v, window_size=(6, 0), seen=lambda i, j: (i + j) % 3 != 0)
    assert not torch.allclose(found[0], plain[0])
    # The bias as one more dimension of queries and keys, whose product it is.
    wide_q = torch.cat([q, bias[None, :, None].expand(BATCH, 5, HEADS, 12) * DIM**0.5], -1)
    wide_k = torch.cat(
        [k, torch.eye(12, dtype=torch.float64)[None, :, None].expand(BATCH, 12, KV_HEADS, 12)], -1
    )
    expected = dense(wide_q, wide_k, v, DIM**-0.5, window_size=(6, 0), seen=lambda i, j: (i + j) % 3 != 0)
    same(found[:2], expected, [*leaves, table])


def test_compiled():
    arguments = {"causal": True, "softcap": 4.0, "attention_chunk": 16}
    leaves = [x.detach() for x in given(40, 50, torch.float32)]
    compiled = torch.compile(flash.flash_attn_func, backend="flex_inductor", fullgraph=True)
    with served_by("cpu"):
        out, lse, _ = compiled(*leaves, **arguments, return_attn_probs=True)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        chunks = lambda i, j: i // 16 == j // 16  # noqa: E731
        expected = dense(*wide, causal=True, softcap=4.0, seen=chunks)
        torch.testing.assert_close((out.double(), lse.double()), expected, rtol=1e-5, atol=1e-5)
        flat = [x.flatten(0, 1) for x in leaves]
        cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (40, 50))
        varlen = torch.compile(flash.flash_attn_varlen_func, backend="flex_inductor", fullgraph=True)
        packed = varlen(*flat, cu_q, cu_k, 40, 50, **arguments)
        torch.testing.assert_close(packed.unflatten(0, (2, 40)), out, rtol=1e-5, atol=1e-5)


def test_new_lengths_in_a_graph():
    """The mask is a few operations on positions: nothing is analysed, and no length compiles again."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flash.flash_attn_func, backend=counter, fullgraph=True)
    for queries, keys in ((40, 50), (200, 300), (300, 130), (128, 128), (2, 700)):
        leaves = [x.detach() for x in given(queries, keys)]
        for arguments in ({"causal": True}, {"window_size": (100, 20), "attention_chunk": 150}):
            found = compiled(*leaves, **arguments)
            arguments = dict(arguments)
            if chunk := arguments.pop("attention_chunk", None):
                arguments["seen"] = lambda i, j, chunk=chunk: i // chunk == j // chunk
            torch.testing.assert_close(found, dense(*leaves, **arguments)[0])
    assert counter.frame_count == 4
    assert not [n for graph in counter.graphs for n in graph.graph.nodes if "block_lists" in str(n.target)]


STATE = (torch.tensor(9), torch.tensor(4))


def test_probabilities_say_what_dropout_leaves_out():
    """Signed as FlashAttention 2 has them: the output follows from those that are not below 0."""
    q, k, v = given(9, 12)
    arguments = {
        "causal": True,
        "softcap": 2.0,
        "dropout_p": 0.25,
        "rng_state": STATE,
        "return_attn_probs": True,
    }
    out, lse, signed = flash.flash_attn_func(q, k, v, **arguments)
    plain = flash.flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True)
    assert torch.equal(lse, plain[1]) and signed.shape == (BATCH, HEADS, 9, 12)
    assert (signed < 0).any()
    values = v.transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close((signed.abs() @ values).transpose(1, 2), plain[0])
    torch.testing.assert_close((signed.clamp(min=0) / 0.75 @ values).transpose(1, 2), out)
    cu_q, cu_k = torch.tensor([0, 9, 12], dtype=torch.int32), torch.tensor([0, 12, 17], dtype=torch.int32)
    packed = [torch.cat([tensor[0], tensor[1, :n]]) for tensor, n in ((q, 3), (k, 5), (v, 5))]
    out, _, signed = flash.flash_attn_varlen_func(*packed, cu_q, cu_k, 9, 12, **arguments)
    assert signed.shape == (2, HEADS, 9, 12) and not signed[1, :, 3:].any() and not signed[1, :, :, 5:].any()
    for n, (queries, keys) in enumerate(((slice(0, 9), slice(0, 12)), (slice(9, 12), slice(12, 17)))):
        values = packed[2][keys].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        want = signed[n, :, :rows, :columns].clamp(min=0) / 0.75 @ values
        torch.testing.assert_close(out[queries].transpose(0, 1), want)


def test_wrong_calls():
    q, k, v = given(5, 5)
    for arguments, text in (
        ({"dropout_p": 1}, r"^dropout_p: expected a number from 0 to less than 1, got 1"),
        ({"window_size": 4}, r"^window_size: expected a pair \(left, right\) of token counts"),
    ):
        with pytest.raises(FlexError, match=text):
            flash.flash_attn_func(q, k, v, **arguments)
    with pytest.raises(
        FlexError, match=r"^q: expected \[batch, length, heads, head_dim\], got shape \[5, 4, 8\]"
    ):
        flash.flash_attn_func(q[0], k[0], v[0])
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(FlexError, match=r"^q: expected \[tokens, heads, head_dim\]"):
        flash.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5)
    for call, text in (
        (lambda: flash.flash_attn_func(q, None, v), "^k must be a torch.Tensor, but is None"),
        (
            lambda: flash.flash_attn_func(q, k, v[0]),
            r"^v: expected \[batch, length, heads, head_dim\], got shape",
        ),
        (
            lambda: flash.flash_attn_varlen_func(q[0], k, v, cu, cu, 5, 5),
            r"^k: expected \[tokens, heads, head_dim",
        ),
        (
            lambda: flash.flash_attn_qkvpacked_func(q),
            r"^qkv: expected \[batch, length, 3, heads, head_dim\], got",
        ),
        (
            lambda: flash.flash_attn_kvpacked_func(q, q[:, :, None]),
            r"^kv: expected \[batch, length, 2, heads, hea",
        ),
    ):
        with pytest.raises(FlexError, match=text):
            call()


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_goes_by_the_indices_that_mods_see(compiled):
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 6)
    state = torch.tensor(3), torch.tensor(2)
    more = {"dropout_p": 0.5, "causal": True, "return_attn_probs": True, "rng_state": state, "softcap": 3.0}
    padded = (
        torch.compile(flash.flash_attn_func, backend="flex_inductor") if compiled else flash.flash_attn_func
    )
    out, lse, probabilities = padded(q, k, v, **more)
    starts = (torch.arange(3, dtype=torch.int32) * t.size(1) for t in (q, k))
    packed = (t.flatten(0, 1) for t in (q, k, v))
    want, want_lse, want_probabilities = flash.flash_attn_varlen_func(*packed, *starts, 5, 9, **more)
    torch.testing.assert_close(out.flatten(0, 1), want)
    torch.testing.assert_close(lse.transpose(0, 1).flatten(1), want_lse)
    torch.testing.assert_close(probabilities, want_probabilities)


def test_probabilities_of_nothing():
    q, k = torch.randn(6, 4, 8), torch.randn(0, 2, 8)
    some, none = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 6], [0, 0, 0]))
    more = {"dropout_p": 0.5, "return_attn_probs": True}
    out, _, probabilities = flash.flash_attn_varlen_func(q, k, k, some, none, 4, 3, **more)
    assert not out.any() and probabilities.shape == (2, 4, 4, 3) and not probabilities.any()
    out, _, probabilities = flash.flash_attn_varlen_func(q[:0], q, q, none, some, 3, 4, **more)
    assert out.shape == (0, 4, 8) and probabilities.shape == (2, 4, 3, 4) and not probabilities.any()


def test_a_softcap_below_0_is_none():
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    assert torch.equal(flash.flash_attn_func(q, k, v, softcap=-1.0), flash.flash_attn_func(q, k, v))
