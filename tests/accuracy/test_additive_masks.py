"""Masks by a large negative number that a score_mod adds, with each route, against dense softmaxes in fp64.

The padding is longer than a tile: rows meet tiles with nothing but masked keys. Under a causal mask the queries of the
padding see no others.
"""

import functools
import math

import pytest
import torch
from marks import slow_but
from support import served_by

from flex_inductor import AuxRequest, Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.masks import causal

NUMBERS = [torch.finfo(torch.float32).min, -1e30, -1e9, -1e4]
# Padding, keys, and how many of the last tokens are queries.
MANY, FEW = (140, 180, 180), (700, 730, 3)
CALLS = {"many": MANY, "sinks": MANY, "few": FEW, "few, all padding": (730, 730, 3), "packed": MANY}
AFTER = 20  # tokens of another packed sequence, all of them padding
HEADS = 2
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dense(query, key, value, pad, sinks, above):
    """In fp64, but for what fp32 has no room for beside such a number: a score, and in an lse the logarithm of how many keys
    there are, so that the weights of a row's gradients add up to their number."""
    (queries, head_dim), keys = query.shape[-2:], key.size(-2)
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    scores = (query @ key.mT * head_dim**-0.5 + pad).float().double().masked_fill(later, -math.inf)
    all_scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(HEADS, queries, 1)], -1)
    lse = all_scores.logsumexp(-1)
    out = all_scores.softmax(-1)[..., :keys] @ value
    weight = (scores - lse.float().double().unsqueeze(-1)).exp()
    d_score = weight * (above @ value.mT - (above * out).sum(-1, keepdim=True))
    d_query = d_score @ key * head_dim**-0.5
    d_key, d_value = d_score.mT @ query * head_dim**-0.5, weight.mT @ above
    return {
        "d_pad": d_score.sum((0, 1)),
        **{"lse": lse, "max_scores": scores.amax(-1)},
        **{"out": out, "d_query": d_query, "d_key": d_key.sum(0)[None], "d_value": d_value.sum(0)[None]},
    }


def judged(call, number, dtype, compile, sizes=None, head_dim=16):
    padding, keys, queries = sizes or CALLS[call]
    packed = call == "packed"
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    ends = [(queries, keys), *([(queries + AFTER, keys + AFTER)] if packed else [])]

    def tokens(heads, length):  # scores of such numbers have room beside -1e4
        return torch.randint(-4, 5, (heads, length, head_dim), generator=generator).to(dtype) / 4

    query, key, value = tokens(HEADS, ends[-1][0]), tokens(1, ends[-1][1]), tokens(1, ends[-1][1])
    above = tokens(HEADS, ends[-1][0])
    if number > -1e9:  # where an lse of padding alone is rounded, by a part of a thousand
        for first, (last, _) in zip((0, queries), ends, strict=False):
            above[:, first : min(first + padding + queries - keys, last)] = 0
    pad = torch.where(torch.arange(keys) < padding, number, 0.0)
    sinks = torch.tensor([0.5, 3.0] if call == "sinks" else [-math.inf] * HEADS)

    def attend(query, key, value, pad):
        aux = AuxRequest(lse=True, max_scores=True)
        given = {"enable_gqa": True, "return_aux": aux, "sinks": sinks if call == "sinks" else None}

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + pad[kv_idx]

        if packed:
            sequences = Sequences.from_lengths([queries, AFTER])
            mask = sequences.mask(causal())
            return varlen_attention(query, key, value, sequences, score_mod, block_mask=mask, **given)
        mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= keys - queries, None, None, queries, keys, "cpu"
        )
        return flex_attention(query, key, value, score_mod, mask, **given)

    def turned(t):
        return t.transpose(0, 1) if packed else t[None]

    leaves = [t.requires_grad_() for t in (*map(turned, (query, key, value)), pad)]
    out, aux = compile(attend)(*leaves)
    *grads, d_pad = torch.autograd.grad(out, leaves, turned(above))
    of_rows = [aux.lse, aux.max_scores]
    of_tokens = [t.transpose(0, 1) if packed else t[0] for t in (out, *grads)]
    found = [d_pad, *(of_rows if packed else [t[0] for t in of_rows]), *of_tokens]

    parts, starts = [], (0, 0)
    for stops in ends:
        q, k = (slice(*at) for at in zip(starts, stops, strict=True))
        rows = [t[:, at].detach().double() for t, at in ((query, q), (key, k), (value, k), (above, q))]
        parts.append(dense(*rows[:3], pad.detach().double()[: rows[1].size(1)], sinks, rows[3]))
        starts = stops
    want = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name != "d_pad"}
    d_pads = [torch.nn.functional.pad(part["d_pad"], (0, keys - part["d_pad"].numel())) for part in parts]
    want = {"d_pad": sum(d_pads), **want}
    for (name, gold), got in zip(want.items(), found, strict=True):
        allowed = ROUNDING[torch.float32 if name in ("lse", "max_scores") else dtype]
        atol = allowed * max(1.0, gold.abs().clamp(max=100).max().item())
        torch.testing.assert_close(
            got.double(), gold, rtol=allowed, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


COMPILED = [(route, call, number) for route in ("cpu", "chunked") for call in CALLS for number in NUMBERS]


@pytest.mark.parametrize(
    "case", slow_but(COMPILED, ("cpu", "packed", NUMBERS[0]), ("chunked", "few", NUMBERS[1])), ids=str
)
def test_compiled(case):
    route, *call = case
    options = {"route": route}
    compile = functools.partial(torch.compile, backend="flex_inductor", dynamic=False, options=options)
    with served_by(route):
        judged(*call, torch.float32, compile)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("call", CALLS)
def test_eager(call, number):
    judged(call, number, torch.float32, lambda given: given)
