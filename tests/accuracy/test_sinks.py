"""Sinks: one more score for each row, with every route, against fp64 softmaxes over one more column."""

import functools

import pytest
import torch
from support import Sizes, and_sinks, judge_call, logits, served_by
from torch.autograd import gradcheck

from flex_inductor import (
    AuxRequest,
    FlexError,
    Sequences,
    create_block_mask,
    flex_attention,
    set_eager_kernels,
    varlen_attention,
)
from flex_inductor.softmax import with_sinks

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=70)
FEW = SIZES._replace(queries=2, keys=300)


def dense(build, query, key, value, captures, block_mask):
    """The logits of each row and its sink, as one softmax."""
    *captures, sinks = captures
    scores = logits(build, query, key, captures, block_mask)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    all_scores = and_sinks(scores, sinks)
    out = torch.softmax(all_scores, -1)[..., :-1] @ value
    return out, all_scores.logsumexp(-1), scores.amax(-1)


def attend(build, query, key, value, captures, block_mask):
    *captures, sinks = captures
    mod = None if build is None else build(*captures)
    aux = AuxRequest(lse=True, max_scores=True)
    given = {"enable_gqa": True, "return_aux": aux, "sinks": sinks}
    out, aux = flex_attention(query, key, value, mod, block_mask, **given)
    return out, aux.lse, aux.max_scores


CALLS = {  # score_mod, mask, sizes, dtype
    "plain": (None, "none", SIZES, torch.float32),
    "bias": ("relative_bias", "causal", SIZES, torch.float16),
    "few": ("alibi", "causal", FEW, torch.float16),
    "few, in parts": (None, "none", FEW._replace(batch=1), torch.float32),
}


def judged(call, compile):
    sinks = torch.tensor([-torch.inf, -1.0, 0.5, 30.0])
    judge_call(CALLS[call], attend, dense, compile, [sinks])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("route", ["cpu", "chunked"])
def test_compiled(route, call):
    options = {"route": route, "verify": True}
    with served_by(route):
        judged(
            call, functools.partial(torch.compile, backend="flex_inductor", dynamic=False, options=options)
        )


@pytest.mark.parametrize("call", CALLS)
def test_eager(call):
    judged(call, lambda given: given)


def dead_rows(sinks, compile):
    """Rows from 20 on see nothing."""
    mask = create_block_mask(lambda b, h, q, kv: (q < 20) & (kv < 40), None, None, 150, 60, "cpu")
    query, key, value = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (150, 60, 60))
    run = compile(lambda *qkv: flex_attention(*qkv, block_mask=mask, return_lse=True, sinks=sinks))
    out, lse = run(query, key, value)
    grads = torch.autograd.grad((out.sum() + lse.square().sum()), (query, key, value, sinks))
    assert not out[:, :, 20:].any()
    assert torch.equal(lse[:, :, 20:], sinks.detach().view(1, -1, 1).expand(1, 2, 130))
    assert not grads[0][:, :, 20:].any() and not grads[1][:, :, 40:].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[3] - 2 * 130 * sinks).abs().max() < 2 * 20 * 6  # the rows that see keys add little


@pytest.mark.parametrize("backend", ["eager", "flex_inductor"])
def test_a_row_without_keys_has_the_sink_for_its_logsumexp(backend):
    dead_rows(
        torch.tensor([3.0, -2.0], requires_grad=True), functools.partial(torch.compile, backend=backend)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences_with_tokens_in_none(compiled):
    """A sequence without keys, and rows behind the last sequence."""
    sequences = Sequences.from_lengths([30, 1, 50], [40, 7, 0])
    query, key, value = (torch.randn(n, 2, 16, requires_grad=True) for n in (90, 47, 47))
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)

    def run(*args):
        return varlen_attention(*args[:3], sequences, return_lse=True, sinks=args[3])

    attend = torch.compile(run, backend="flex_inductor") if compiled else run
    out, lse = attend(query, key, value, sinks)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    upstream[1][:, 81:] = 0.0
    got = torch.autograd.grad((out, lse), (query, key, value, sinks), upstream)
    want_out, want_lse = torch.zeros(90, 2, 16).double(), torch.full((2, 90), -torch.inf).double()
    wide = [t.detach().double().requires_grad_() for t in (query, key, value, sinks)]
    for q, k in (((0, 30), (0, 40)), ((30, 31), (40, 47)), ((31, 81), (47, 47))):
        part = [t[slice(*at)].transpose(0, 1)[None] for t, at in zip(wide, (q, k, k), strict=False)]
        scores = torch.cat(
            [part[0] @ part[1].mT / 4, wide[3].view(1, 2, 1, 1).expand(1, 2, q[1] - q[0], 1)], -1
        )
        want_out[slice(*q)] = (scores.softmax(-1)[..., :-1] @ part[2])[0].transpose(0, 1)
        want_lse[:, slice(*q)] = scores.logsumexp(-1)[0]
    assert torch.equal(lse[:, 81:].double(), want_lse[:, 81:])
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[:, :81].double(), want_lse[:, :81], rtol=0, atol=2e-6)
    want = torch.autograd.grad(
        (want_out, want_lse[:, :81]), wide, (upstream[0].double(), upstream[1][:, :81].double())
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5)


def test_gradcheck():
    query, key, value = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    gradcheck(
        lambda q, k, v, s: flex_attention(q, k, v, sinks=s, return_lse=True), (query, key, value, sinks)
    )


def test_bf16():
    """In chunks as good as rounding the exact result; in any route better than a sink that is applied to the output."""
    query, key, value = SIZES._replace(kv_heads=4, queries=128, keys=128, head_dim=64).inputs(torch.bfloat16)
    sinks = torch.randn(4) + 4
    gold = dense(None, query.double(), key.double(), value.double(), [sinks.double()], None)[0]

    def error(out):
        return (out.to(torch.bfloat16).double() - gold).abs().mean()

    assert error(flex_attention(query, key, value, sinks=sinks)) <= 1.1 * error(gold)
    for run in (flex_attention, torch.compile(flex_attention, backend="flex_inductor")):
        outside, _ = with_sinks(*run(query, key, value, return_lse=True), sinks[None])
        assert error(run(query, key, value, sinks=sinks)) < 0.95 * error(outside)


@pytest.mark.parametrize("per_example", [False, True])
def test_vmap(per_example):
    query, key, value = (torch.randn(3, 2, 2, 9, 8) for _ in range(3))
    sinks = torch.randn(3, 2) if per_example else torch.randn(2)

    def loss(q, k, v, s):
        return flex_attention(q, k, v, sinks=s).square().sum()

    dims = (0, 0, 0, 0 if per_example else None)
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 3)), dims)(query, key, value, sinks)
    for i in range(3):
        own = sinks[i] if per_example else sinks
        want = torch.func.grad(loss, argnums=(0, 3))(query[i], key[i], value[i], own)
        torch.testing.assert_close([got[0][i], got[1][i]], [*want])


@pytest.mark.parametrize(
    "sinks, message",
    [
        (torch.zeros(3), "got a tensor of shape [3] and dtype torch.float32"),
        (torch.zeros(1, 4), "got a tensor of shape [1, 4] and dtype torch.float32"),
        (torch.zeros(4, dtype=torch.int64), "got a tensor of shape [4] and dtype torch.int64"),
        (0.5, "got a float"),
        (torch.zeros(4, device="meta"), "sinks: expected a tensor on cpu, as query is, got one on meta"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_bad_sinks_are_refused_by_name(sinks, message, compiled):
    run = torch.compile(flex_attention, backend="flex_inductor") if compiled else flex_attention
    with pytest.raises(FlexError) as error:
        run(*(torch.randn(1, 4, 8, 16) for _ in range(3)), sinks=sinks)
    assert str(error.value).startswith("sinks: expected") and message in str(error.value)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_gradients_of_sinks_alone(mode):
    query, sinks = torch.randn(1, 2, 20, 8), torch.zeros(2, requires_grad=True)
    before = set_eager_kernels(mode)
    out, lse = flex_attention(query, query, query, sinks=sinks, return_lse=True)
    (got,) = torch.autograd.grad(out.sin().sum() + lse.sum(), sinks)
    set_eager_kernels(before)
    scores = torch.cat((query @ query.mT / 8**0.5, sinks.view(1, 2, 1, 1).expand(1, 2, 20, 1)), -1)
    dense = (scores.softmax(-1)[..., :-1] @ query).sin().sum() + scores.logsumexp(-1).sum()
    torch.testing.assert_close(got, torch.autograd.grad(dense, sinks)[0])


def test_a_sink_that_is_not_a_number_is_seen():
    query, sinks = torch.randn(1, 2, 5, 8), torch.tensor([torch.nan, 0.0])
    compiled = torch.compile(flex_attention, backend="flex_inductor")
    for attend in (flex_attention, compiled):
        out, lse = attend(query, query, query, sinks=sinks, return_lse=True)
        assert out[:, 0].isnan().all() and lse[:, 0].isnan().all() and not out[:, 1].isnan().any()


def test_checked_without_keys():
    query, key, sinks = torch.randn(5, 2, 8), torch.randn(6, 2, 8), torch.randn(2)
    sequences = Sequences(*(torch.tensor(cu, dtype=torch.int32) for cu in ([0, 2, 5], [0, 0, 6])))
    run = torch.compile(varlen_attention, backend="flex_inductor", options={"verify": True})
    asked = AuxRequest(lse=True, max_scores=True, max_indices=True, entropy=True)
    _, found = run(query, key, key, sequences, sinks=sinks, return_aux=asked)
    torch.testing.assert_close(found.lse[:, :2], sinks[:, None].expand(2, 2))
    assert (found.max_indices[:, :2] == -1).all()
