"""Functions of scores in few instructions, by Triton's interpreter, against fp64. See test_interpreted.py.

The scores are the queries: one key, 1, of one dimension. Their maximum is what score_mod made of them.
"""

import pytest
import torch
import torch.nn.functional as F
from marks import slow_but
from support import Sizes, attention_of, dense_of, judge, served_by

from flex_inductor import AuxRequest, flex_attention
from flex_inductor.tools import interpret

POWERS = [lambda x: x**1.5, lambda x: x**-0.7]
FUNCTIONS = [
    *POWERS,
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt,
    torch.sigmoid, torch.tanh, F.softplus, F.silu,
    lambda x: torch.exp(x * -0.25), lambda x: torch.tanh(x / 30), lambda x: torch.log(x.abs() + 1),
]  # fmt: skip
MAGNITUDES = [
    0, 6e-8, 1e-3, 0.0155, 0.0157, 0.5, 0.998, 1, 1.002, 3, 10, 17, 30, 85, 88.5, 89, 104, 1000, 65504, float("inf"),
]  # fmt: skip


def each_head_its_function(functions):
    def score_mod(score, b, h, q_idx, kv_idx):
        result = score
        for i, function in enumerate(functions):
            result = torch.where(h == i, function(score), result)
        return result

    return score_mod


def judged(scores, upstream=None):
    """The maximum and the logsumexp of every score's function, and its derivative where asked for."""
    heads = len(FUNCTIONS)
    query = scores.half()[None, None, :, None].repeat(1, heads, 1, 1).requires_grad_(upstream is not None)
    one = torch.ones(1, heads, 1, 1, dtype=torch.float16)

    def attend(query, key):
        score_mod, aux = each_head_its_function(FUNCTIONS), AuxRequest(lse=True, max_scores=True)
        return flex_attention(query, key, key, score_mod, scale=1.0, return_aux=aux)[1]

    with served_by("triton"):
        aux = interpret.compiled(attend)(query, one)
        if upstream is None:
            return aux.max_scores[0], aux.lse[0]
        return torch.autograd.grad(aux.lse, query, torch.full_like(aux.lse, upstream))[0][0, :, :, 0]


def test_values_up_to_the_ends_of_the_range():
    scores = torch.tensor(MAGNITUDES + [-x for x in MAGNITUDES] + [float("nan")], dtype=torch.float16)
    maximum, lse = judged(scores)
    for head, function in enumerate(FUNCTIONS):
        want = function(scores.double())
        want = torch.where(want.abs() < torch.finfo(torch.float32).max, want, want * float("inf"))
        if function in POWERS:
            want[scores < 0] = float("nan")  # of -inf too, where the library has infinity and 0
        kept = ~want.isnan()
        assert lse[head][~kept].isnan().all() and not lse[head][want < 1e38].isnan().any(), head
        got = maximum[head].double()
        torch.testing.assert_close(
            got[kept], want[kept], rtol=2**-16, atol=3e-7, msg=lambda m, head=head: f"{head}: {m}"
        )


def test_derivatives():
    scores = torch.tensor([x for x in MAGNITUDES if 1e-4 < x <= 10], dtype=torch.float16)
    got = judged(scores, upstream=1.0)
    for head, function in enumerate(FUNCTIONS):
        x = scores.double().requires_grad_()
        (want,) = torch.autograd.grad(function(x).sum(), x)
        want = want.half()  # too large for fp16 near 0, some
        torch.testing.assert_close(
            got[head], want, rtol=2e-3, atol=1e-6, msg=lambda m, head=head: f"{head}: {m}"
        )


@pytest.mark.parametrize("dtype", slow_but([torch.float16, torch.float32], torch.float16))
def test_as_right_as_dense_attention(dtype):
    def build(strength):
        def score_mod(score, b, h, q_idx, kv_idx):
            far = torch.log1p(torch.exp(strength) * (q_idx - kv_idx).abs())  # off the score, by indices alone
            return F.softplus(score) * torch.sigmoid(score) - far + torch.sqrt(score.abs() + 1) ** 1.5

        return score_mod

    sizes = Sizes(batch=1, queries=33, keys=40)
    with served_by("triton", "triton"):
        attend = interpret.compiled(attention_of(build))
        judge(attend, dense_of(build), sizes.inputs(dtype), (torch.tensor(0.3, dtype=torch.float64),))
