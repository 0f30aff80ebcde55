"""Keys and values of 8 bits, judged by fp64 attention to what they stand for."""

import functools
import math

import pytest
import torch
from support import served_by

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
    "row": (torch.rand(2, 2, 300) + 0.2, torch.rand(2, 2, 300) + 0.2),
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
    gold, result = dense(*wide), torch.bfloat16 if dtype == narrow else dtype
    assert out.dtype == result
    plain = dense(*(t.to(result) for t in wide))
    assert (out.double() - gold).abs().max() <= 1.1 * (plain.double() - gold).abs().max() + 2e-6


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


@pytest.mark.parametrize("narrow", [E4M3, E5M2])
def test_every_number_of_8_bits(narrow):
    """256 values, of which one row sees each: they come out as they are, NaN and infinity too."""
    value = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(narrow).view(1, 1, 16, 16)
    query = torch.zeros(1, 1, 16, 16)
    attend = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i == j, s, -math.inf)),
        backend="flex_inductor",
    )
    got = attend(
        query,
        torch.zeros(1, 1, 16, 16).to(narrow),
        torch.where(value.float().isfinite(), value.float(), 0.0).to(narrow),
    )
    assert torch.equal(got, torch.where(value.float().isfinite(), value.float(), 0.0))
    found = attend(query[:, :, :1], torch.zeros(1, 1, 1, 16).to(narrow), value[:, :, 7:8])
    assert torch.equal(found.isnan(), value[:, :, 7:8].float().isnan())


@pytest.mark.parametrize("compiled", [False, True])
def test_pages(compiled):
    """A pool of pages of 16 tokens with a scale for each token, and for each head."""
    lengths, pages = [40, 7], torch.tensor([[3, 0, 5], [1, -1, -1]], dtype=torch.int32)
    pools = [torch.randn(6, 16, 2, 32).to(E4M3) for _ in range(2)]
    sequences = Sequences(
        torch.tensor([0, 1, 3], dtype=torch.int32),
        used_k=torch.tensor(lengths, dtype=torch.int32),
        pages=pages,
        page_size=16,
    )
    query, k_scale, v_scale = torch.randn(3, 4, 32), torch.rand(6, 16, 2) + 0.5, torch.rand(2) + 0.5

    def run(query):
        return varlen_attention(query, *pools, sequences, enable_gqa=True, k_scale=k_scale, v_scale=v_scale)

    out = (torch.compile(run, backend="flex_inductor") if compiled else run)(query)
    wide = [(pools[0].double() * k_scale.double()[..., None]), pools[1].double() * v_scale.double()[:, None]]
    for n, rows in enumerate((slice(0, 1), slice(1, 3))):
        key, value = (t[pages[n].clamp(min=0)].flatten(0, 1)[: lengths[n]].transpose(0, 1) for t in wide)
        key, value = (t.repeat_interleave(2, 0) for t in (key, value))
        scores = query[rows].double().transpose(0, 1) @ key.mT / math.sqrt(32)
        want = (scores.softmax(-1) @ value).transpose(0, 1)
        torch.testing.assert_close(out[rows].double(), want, rtol=0, atol=1e-5)


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
    with torch.no_grad():
        assert flex_attention(query, narrow, narrow).isfinite().all()
    with pytest.raises(FlexError, match="attention to keys and values of 8 bits has no derivatives"):
        torch.func.jvp(lambda q: flex_attention(q, narrow, narrow), (query.detach(),), (query.detach(),))


def test_over_ranks_they_and_their_scales_are_refused_by_name():
    from flex_inductor.distributed.methods import PlannedMask

    planned, query = object.__new__(PlannedMask), torch.randn(1, 2, 5, 16)
    narrow = query.to(E4M3)
    for given in ((narrow, narrow), (query, query)):
        with pytest.raises(FlexError, match="keys and values of 8 bits, and their scales, are not served"):
            flex_attention(query, *given, block_mask=planned, k_scale=torch.ones(()))
