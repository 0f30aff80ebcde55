"""Keys and values of 8 bits, judged by fp64 attention to what they stand for."""

import functools
import math
from contextlib import nullcontext

import pytest
import torch
from support import assert_within, bounded, served_by

from flex_inductor import FlexError, Sequences, flex_attention, mods, varlen_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = {"route": "cpu", "verify": True}


def scaled(tensor, scale):
    """[B, H, S, D] in fp64, by a scale for all, for each head, or for each row."""
    wide = tensor.double()
    return wide if scale is None else wide * scale.double().view(*scale.shape, *(1,) * (4 - scale.dim()))


SLOPES = mods.alibi_slopes(4)


def nearer(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def dense(query, key, value):
    """Of any dtype."""
    key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    scores = query @ key.mT / math.sqrt(query.size(-1))
    distance = torch.arange(query.size(2)).view(-1, 1) - torch.arange(key.size(2))
    scores = scores - SLOPES.view(-1, 1, 1).to(scores.dtype) * distance.abs()
    return scores.softmax(-1) @ value


SCALES = {  # of keys, of values
    "none": (None, None),
    "tensor": (torch.tensor(0.3), torch.tensor(2.5)),
    "head": (torch.tensor([[0.5, 1.5], [0.7, 0.3]]), torch.tensor([[2.0, 0.1], [1.0, 3.0]])),
    "row": tuple(torch.rand(2, 2, 2, 300, generator=torch.Generator().manual_seed(0)) + 0.2),
}


def given(queries, dtype, narrow):
    shapes = (2, 4, queries, 40), (2, 2, 300, 40), (2, 2, 300, 24)
    query, key, value = (torch.randn(shape) for shape in shapes)
    return query.to(dtype), key.to(narrow), value.to(narrow)


def judged(compile, queries, dtype, narrow, scales):
    tensors, (k_scale, v_scale) = given(queries, dtype, narrow), SCALES[scales]
    q_scale = torch.tensor(0.6) if dtype == narrow else None
    run = compile(
        lambda *qkv: flex_attention(
            *qkv,
            nearer,
            enable_gqa=True,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    )
    out = run(*tensors)
    wide = [scaled(t, s) for t, s in zip(tensors, (q_scale, k_scale, v_scale), strict=True)]
    result = torch.bfloat16 if dtype == narrow else dtype
    assert out.dtype == result
    assert_within({"out": out}, *bounded(result, (), lambda *_: {"out": dense(*wide)}, wide))


@pytest.mark.parametrize("queries", [70, 1])
@pytest.mark.parametrize(
    "dtype, narrow, scales",
    [
        (torch.float32, E4M3, "row"),
        (torch.float32, E5M2, "none"),
        (torch.float16, E5M2, "head"),
        (torch.bfloat16, E4M3, "tensor"),
        (E4M3, E4M3, "head"),
    ],
    ids=str,
)
def test_uncompiled(queries, dtype, narrow, scales):
    judged(lambda run: run, queries, dtype, narrow, scales)


@pytest.mark.parametrize(
    "queries, dtype, narrow, scales",
    [
        (70, torch.float32, E4M3, "row"),
        (70, torch.bfloat16, E5M2, "head"),
        (70, E4M3, E4M3, "tensor"),
        (1, torch.float32, E5M2, "head"),
        (1, torch.bfloat16, E4M3, "row"),
    ],
    ids=str,
)
def test_in_cpu_kernels(queries, dtype, narrow, scales):
    with served_by("cpu"):
        judged(
            functools.partial(torch.compile, backend="flex_inductor", dynamic=False, options=OPTIONS),
            queries, dtype, narrow, scales,
        )  # fmt: skip


def every_number(compile, narrow, dtype=torch.float32, columns=64):
    """256 values come out as they are where all keys have the same. NaN and infinity are in the last columns."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(narrow).view(4, 1, 1, 1, 64)
    query, key = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 1, 64, 16).to(narrow)
    attend = compile(lambda *qkv: flex_attention(*qkv))
    for value in values[..., :columns]:
        found = attend(query, key, value.expand(1, 1, 64, -1).contiguous())
        torch.testing.assert_close(found, value.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
def test_every_number_of_8_bits(narrow):
    every_number(functools.partial(torch.compile, backend="flex_inductor"), narrow)


LENGTHS = [40, 7]
PAGES = torch.tensor([[3, 0, 5], [1, -1, -1]], dtype=torch.int32)
PLACES = {  # arguments of Sequences, the shape of keys before heads, the keys of a sequence, scales by head
    "packed": (
        {"cu_k": torch.tensor([0, 40, 47], dtype=torch.int32)},
        (47,),
        lambda t, n: t[:40] if n == 0 else t[40:],
        {"v_scale"},
    ),
    "cached": (
        {"used_k": torch.tensor(LENGTHS).int()},
        (2, 50),
        lambda t, n: t[n, : LENGTHS[n]],
        {"k_scale"},
    ),
    "paged": (
        {"used_k": torch.tensor(LENGTHS).int(), "pages": PAGES, "page_size": 16},
        (6, 16),
        lambda t, n: t[PAGES[n].clamp(min=0)].flatten(0, 1)[: LENGTHS[n]],
        {},
    ),
}


def in_sequences(compile, place, queries=(1, 2), dtype=torch.float32):
    """With a scale for each token but for what has one for each head."""
    given, shape, keys_of, by_head = PLACES[place]
    stored = [torch.randn(*shape, 2, 32).to(E4M3) for _ in range(2)]
    scales = {
        name: torch.rand(2 if name in by_head else (*shape, 2)) + 0.5 for name in ("k_scale", "v_scale")
    }
    offsets = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32)
    sequences, query = Sequences(offsets, **given), torch.randn(sum(queries), 4, 32).to(dtype)
    run = compile(lambda query: varlen_attention(query, *stored, sequences, enable_gqa=True, **scales))
    out = run(query)
    wide = [t.double() * scale.double()[..., None] for t, scale in zip(stored, scales.values(), strict=True)]
    for n in range(2):
        rows = slice(*offsets[n : n + 2])
        tensors = query[rows].double(), *(keys_of(t, n).clone() for t in wide)
        gold = bounded(dtype, (), lambda *_, tensors=tensors: {"out": _dense_rows(*tensors)}, tensors)
        assert_within({"out": out[rows]}, *gold)


def _dense_rows(query, key, value):
    """[T, H, D], in which every query sees every key."""
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    key, value = (t.repeat_interleave(2, 0) for t in (key, value))
    return ((query @ key.mT / math.sqrt(32)).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize(
    "place, compiled",
    [("paged", False), ("paged", True), pytest.param("cached", True, marks=pytest.mark.slow)],
)
def test_sequences(place, compiled):
    in_sequences(functools.partial(torch.compile, backend="flex_inductor" if compiled else "eager"), place)


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"k_scale": torch.ones(3)},
            r"k_scale: expected a floating tensor of one of the shapes \[\], \[2, 2\], \[2, 2, 300\]",
        ),
        ({"v_scale": 2.0}, "v_scale: expected a floating tensor of one of the shapes .*, got a float"),
        ({"q_scale": torch.ones(())}, "q_scale: got a scale where the tensor is torch.float32"),
        ({"k_scale": torch.ones((), device="meta")}, "k_scale: expected a tensor on cpu"),
        ({"key": torch.randn(2, 2, 300, 40)}, "query, key and value must have the same dtype"),
    ],
)
def test_bad_scales_are_refused_by_name(changed, message):
    arguments = dict(zip(("query", "key", "value"), given(5, torch.float32, E4M3), strict=True))
    with pytest.raises(FlexError, match=message):
        flex_attention(**{**arguments, "enable_gqa": True, **changed})


def test_wide_keys_have_no_scales_and_narrow_ones_no_gradients():
    query = torch.randn(1, 2, 5, 16, requires_grad=True)
    with pytest.raises(FlexError, match=r"k_scale: got a scale where the tensor is torch.float32"):
        flex_attention(query, query, query, k_scale=torch.ones(()))
    narrow = query.detach().to(E4M3)
    with pytest.raises(
        FlexError, match=r"query: it requires a gradient, and attention to keys of .*e4m3fn has none"
    ):
        flex_attention(query, narrow, narrow)
    scale = torch.ones((), requires_grad=True)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(FlexError, match=f"{name}: it requires a gradient"):
            flex_attention(query.detach(), narrow, narrow, **{name: scale})
        with pytest.raises(FlexError, match=f"{name}: it requires a gradient"):
            varlen_attention(*[narrow[0].transpose(0, 1)] * 3, Sequences.from_lengths([5]), **{name: scale})
    with torch.no_grad():
        assert flex_attention(query, narrow, narrow, k_scale=scale, v_scale=scale).isfinite().all()
    with pytest.raises(FlexError, match="attention to keys and values of 8 bits has no derivatives"):
        torch.func.jvp(lambda q: flex_attention(q, narrow, narrow), (query.detach(),), (query.detach(),))


@pytest.mark.parametrize("compiled", [False, True])
def test_captures_sinks_and_scales_of_queries_learn(compiled):
    query, key, value = given(30, E4M3, E4M3)
    key, value = (t[:, :, :40] for t in (key, value))
    table, sinks, q_scale = torch.randn(40), torch.randn(4), torch.rand(2, 4) + 0.5

    def call(table, sinks, q_scale):
        return flex_attention(
            *(query, key, value, lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]),
            **{"sinks": sinks, "q_scale": q_scale, "enable_gqa": True},
        )

    def exact(table, sinks, q_scale):
        keys, values = (t.double().repeat_interleave(2, 1) for t in (key, value))
        scores = (query.double() * q_scale[..., None, None]) @ keys.mT / math.sqrt(40) + table
        weights = torch.cat([scores, sinks.view(-1, 1, 1).expand(2, 4, 30, 1)], -1).softmax(-1)
        return weights[..., :-1] @ values

    run = torch.compile(call, backend="flex_inductor", fullgraph=True) if compiled else call
    learnt = [t.clone().requires_grad_() for t in (table, sinks, q_scale)]
    with served_by("cpu", "chunked") if compiled else nullcontext():
        out = run(*learnt)
        got = torch.autograd.grad(out.float().square().sum(), learnt)
    doubles = [t.double().requires_grad_() for t in (table, sinks, q_scale)]
    want = torch.autograd.grad(exact(*doubles).square().sum(), doubles)
    for ours, gold in zip(got, want, strict=True):  # the query is rounded to bfloat16, and so is the output
        assert (ours - gold).norm() <= 0.01 * gold.norm()


def test_over_ranks_they_and_their_scales_are_refused_by_name():
    from flex_inductor.distributed.methods import PlannedMask

    planned, query = object.__new__(PlannedMask), torch.randn(1, 2, 5, 16)
    narrow = query.to(E4M3)
    for given in ((narrow, narrow), (query, query)):
        with pytest.raises(FlexError, match="keys and values of 8 bits, and their scales, are not served"):
            flex_attention(query, *given, block_mask=planned, k_scale=torch.ones(()))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_leaves_keys_and_values_as_they_are(compiled):
    (query, key, value), scales = given(70, torch.bfloat16, E4M3), SCALES["head"]

    def call(query):
        return flex_attention(
            query, key, value, nearer, enable_gqa=True, k_scale=scales[0], v_scale=scales[1]
        )

    run = torch.compile(call, backend="flex_inductor", fullgraph=True) if compiled else call
    want = run(query)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(query.float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_default_dtype_changes_nothing():
    (query, key, value), before = given(70, torch.bfloat16, E4M3), torch.get_default_dtype()
    attend = torch.compile(functools.partial(flex_attention, enable_gqa=True), backend="flex_inductor")
    want = attend(query, key, value)
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.compiler.reset()
        torch.testing.assert_close(attend(query, key, value), want, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(before)
