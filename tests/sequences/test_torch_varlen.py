"""varlen_attn has torch's arguments and means the same by them."""

import inspect

import pytest
import torch
from torch.nn.attention import varlen as torchs

from flex_inductor.errors import FlexError
from flex_inductor.flash import varlen_attn

LENGTHS = [5, 0, 12]
OFFSETS = torch.tensor([0, 5, 5, 17], dtype=torch.int32)


def given(kv_heads=4):
    torch.manual_seed(0)
    return [torch.randn(17, heads, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]


def dense(q, k, v, window, scale=None):
    outs, lses = [], []
    for start, stop in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True):
        of = [t[start:stop].transpose(0, 1) for t in (q, k, v)]
        key, value = (t.repeat_interleave(of[0].size(0) // t.size(0), 0) for t in of[1:])
        scores = of[0] @ key.mT * (8**-0.5 if scale is None else scale)
        away = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left, right = window
        hidden = ((left >= 0) & (away > left)) | ((right >= 0) & (-away > right))
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ value).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def test_arguments_are_those_of_torch():
    ours, theirs = (inspect.signature(f).parameters for f in (varlen_attn, torchs.varlen_attn))
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert list(ours)[:7] == list(theirs)[:7]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_values(window, kv_heads):
    q, k, v = given(kv_heads)
    out, lse = varlen_attn(
        q, k, v, OFFSETS, OFFSETS, 12, 12,
        return_aux=torchs.AuxRequest(lse=True), scale=0.4, window_size=window, enable_gqa=kv_heads < 4,
    )  # fmt: skip
    expected = dense(q, k, v, window, 0.4)
    torch.testing.assert_close((out, lse), expected)
    alone = varlen_attn(q, k, v, OFFSETS, OFFSETS, 12, 12, scale=0.4, window_size=window, enable_gqa=True)
    assert torch.equal(alone, out)


def test_pages():
    q, k, v = given()
    table = torch.tensor([[5, 1, 9], [0, 0, 0], [2, 7, 3]], dtype=torch.int32)
    pools = [torch.full((10, 4, 4, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    for pool, t in zip(pools, (k, v), strict=True):
        for n, start in ((0, 0), (2, 5)):
            for at in range(LENGTHS[n]):
                pool[table[n, at // 4], at % 4] = t[start + at]
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    out = varlen_attn(
        q, *pools, OFFSETS, None, 12, 12, window_size=(-1, 0), seqused_k=used, block_table=table
    )
    torch.testing.assert_close(out, dense(q, k, v, (-1, 0))[0])


def test_heads_that_differ_need_enable_gqa():
    with pytest.raises(FlexError, match="enable_gqa"):
        varlen_attn(*given(2), OFFSETS, OFFSETS, 12, 12)


def test_wrong_calls():
    tokens, cu = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    for (query, key), more, text in (
        ((None, tokens), {}, "^query must be a torch.Tensor, but is None"),
        ((tokens, tokens[0]), {}, r"^key: expected \[tokens, heads, head_dim\], got shape \[2, 8\]"),
        ((tokens, tokens), {"return_aux": True}, "^return_aux must be an AuxRequest or None, but is a bool"),
    ):
        with pytest.raises(FlexError, match=text):
            varlen_attn(query, key, key, cu, cu, 5, 5, **more)
