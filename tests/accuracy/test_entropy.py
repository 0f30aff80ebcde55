"""The entropy of rows and the index of their largest score: each route, each door, against dense softmaxes."""

import functools
import math

import pytest
import torch
from support import Sizes, and_sinks, judge_call, logits, served_by

from flex_inductor import (
    AuxRequest,
    Sequences,
    create_block_mask,
    flex_attention,
    varlen_attention,
)
from flex_inductor.errors import FlexNotImplementedError

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=70)
FEW = SIZES._replace(queries=2, keys=300)
REQUEST = AuxRequest(entropy=True, max_indices=True, max_scores=True)


def entropy_of(scores):
    """That of the softmax of each row; 0 without scores."""
    logs = scores.log_softmax(-1)
    seen = scores > -math.inf
    return -torch.where(seen, logs.exp() * torch.where(seen, logs, 0.0), 0.0).sum(-1)


def dense(build, query, key, value, captures, block_mask):
    *captures, sinks = captures
    scores = logits(build, query, key, captures, block_mask)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    all_scores = and_sinks(scores, sinks)
    return torch.softmax(all_scores, -1)[..., :-1] @ value, entropy_of(all_scores), scores.amax(-1)


def attend(build, query, key, value, captures, block_mask):
    *captures, sinks = captures
    mod = None if build is None else build(*captures)
    given = {"enable_gqa": True, "return_aux": REQUEST, "sinks": sinks}
    out, aux = flex_attention(query, key, value, mod, block_mask, **given)
    return out, aux.entropy, aux.max_scores


CALLS = {  # score_mod, mask, sizes, dtype
    "plain": (None, "none", SIZES, torch.float32),
    "bias": ("relative_bias", "causal", SIZES, torch.float32),
    "few": ("alibi", "causal", FEW, torch.float32),
    "few, in parts": (None, "none", FEW._replace(batch=1), torch.float32),
}


def judged(call, compile):
    sinks = torch.tensor([-torch.inf, -1.0, 0.5, 3.0])
    judge_call(CALLS[call], attend, dense, compile, [sinks])


def largest(run, sizes=SIZES, dtype=torch.float32):
    """Indices of the largest scores: of whole numbers, so that several are the largest, and of rows that see none."""

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx + 5 < q_idx + sizes.keys - sizes.queries

    torch.manual_seed(1)
    query, key, value = (torch.randint(-1, 2, t.shape).to(dtype) for t in sizes.inputs(dtype))
    # Kernels visit partial blocks first, which have the later keys.
    mask = create_block_mask(mask_mod, None, None, sizes.queries, sizes.keys, BLOCK_SIZE=16)

    def call(query, key, value):
        return flex_attention(query, key, value, None, mask, enable_gqa=True, return_aux=REQUEST)[1]

    call = run(call)
    for by in (1, 0):  # with 0 all scores are the largest
        scores = logits(None, query * by, key, (), mask)
        first = (scores == scores.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)  # that is the first
        want = first.where(scores.amax(-1) > -math.inf, -1)
        assert sizes.queries < 6 or (want == -1).any()
        got = call(query * by, key, value)
        assert got.max_indices.dtype == torch.int64 and torch.equal(got.max_indices, want)
        torch.testing.assert_close(got.entropy, entropy_of(scores.double()).float(), rtol=2e-5, atol=2e-5)


def packed(run, prefix=3):
    """Positions are those in a sequence; rows of none have nothing."""
    lengths = torch.tensor([30, 1, 40]), torch.tensor([prefix + 30, prefix + 1, prefix + 40])
    sequences = Sequences.from_lengths(*lengths)
    query = torch.randn(75, 2, 16, requires_grad=True)
    key, value = (torch.randn(int(lengths[1].sum()), 2, 16, requires_grad=True) for _ in range(2))
    mask = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)

    def call(query, key, value):
        return varlen_attention(query, key, value, sequences, block_mask=mask, return_aux=REQUEST)[1]

    aux = run(call)(query, key, value)
    assert aux.entropy.shape == (2, 75) and (aux.max_indices[:, 71:] == -1).all()
    assert (aux.entropy[:, 71:] == 0).all()
    weights = torch.randn(2, 75)
    grads = torch.autograd.grad((aux.entropy * weights).sum(), (query, key))
    entropies, q0, k0 = [], 0, 0
    for rows, keys in zip(*(t.tolist() for t in lengths), strict=True):
        q, k = (t.double()[at : at + n] for t, at, n in ((query, q0, rows), (key, k0, keys)))
        scores = q.transpose(0, 1) @ k.permute(1, 2, 0) / 4
        scores = scores.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1).bool(), -math.inf)
        assert torch.equal(aux.max_indices[:, q0 : q0 + rows], scores.argmax(-1))
        entropies.append(entropy_of(scores))
        q0, k0 = q0 + rows, k0 + keys
    want = torch.cat([*entropies, torch.zeros(2, 4)], 1)
    torch.testing.assert_close(aux.entropy, want.float(), rtol=1e-5, atol=1e-5)
    exact = torch.autograd.grad((want * weights).sum(), (query, key))
    torch.testing.assert_close(grads, exact, rtol=1e-4, atol=1e-4)


def with_padding(run, sizes=SIZES, sink=-torch.inf):
    """Masks that are added: the least number there is, for the first tile of keys, and for all keys of a row."""
    query, key, value = (t.requires_grad_() for t in sizes.inputs(torch.float32))
    added = torch.zeros(sizes.queries, sizes.keys)
    added[:, :65] = added[1] = torch.finfo(torch.float32).min
    sinks = torch.full([sizes.heads], sink)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + added[q_idx, kv_idx]

    def call(query, key, value):
        aux = {"return_aux": REQUEST, "sinks": sinks if sink > -torch.inf else None}
        return flex_attention(query, key, value, score_mod, enable_gqa=True, **aux)[1]

    scores = and_sinks(logits(None, query.double(), key.double(), (), None) + added.double(), sinks)
    got, want = run(call)(query, key, value).entropy, entropy_of(scores)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(got)
    weights[:, :, 1] = 0  # the logsumexp of such a row is rounded by more than scores differ
    grads = (torch.autograd.grad((entropy * weights).sum(), (query, key)) for entropy in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def of_large_scores(run, sizes=SIZES):
    """Scores without rounding, so that nothing but the entropy has any."""
    torch.manual_seed(0)
    query, key, value = (torch.randint(-1, 2, t.shape).float() for t in sizes.inputs(torch.float32))

    def call(query, key, value):
        return flex_attention(
            query, key, value, lambda score, *_: score + 4096, enable_gqa=True, return_aux=REQUEST
        )[1]

    want = entropy_of(logits(None, query.double(), key.double(), (), None))
    torch.testing.assert_close(run(call)(query, key, value).entropy, want.float(), rtol=2e-6, atol=2e-6)


LARGE = {
    "padding": with_padding,
    "padding, sinks": functools.partial(with_padding, sink=0.5),
    "large": of_large_scores,
}
compiled = functools.partial(torch.compile, backend="flex_inductor", dynamic=False)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("route", ["cpu", "chunked"])
def test_compiled(route, call):
    with served_by(route):
        judged(call, functools.partial(compiled, options={"route": route, "verify": True}))


@pytest.mark.parametrize("call", CALLS)
def test_eager(call):
    judged(call, lambda given: given)


@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["many", "few"])
def test_the_first_of_the_largest(sizes):
    largest(lambda call: call, sizes)
    with served_by("cpu"):
        largest(functools.partial(compiled, options={"verify": True}), sizes)


@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["many", "few"])
@pytest.mark.parametrize("check", LARGE)
def test_scores_that_are_large(check, sizes):
    LARGE[check](lambda call: call, sizes)
    with served_by("cpu"):
        LARGE[check](functools.partial(compiled, options={"verify": True}), sizes)


def test_packed_sequences():
    packed(lambda call: call)
    with served_by("cpu"):
        packed(functools.partial(compiled, options={"verify": True}))


def test_dropout_has_no_part_in_it():
    query = torch.randn(1, 2, 40, 16, requires_grad=True)
    found = []
    for p in (0.0, 0.5):
        _, aux = flex_attention(query, query, query, dropout_p=p, return_aux=REQUEST)
        found.append((aux.entropy, aux.max_indices, *torch.autograd.grad(aux.entropy.square().sum(), query)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("compile", [False, True])
def test_under_vmap(compile):
    query, key = torch.randn(3, 1, 2, 20, 16), torch.randn(3, 1, 2, 30, 16)

    def loss(query, key):
        return flex_attention(query, key, key, return_aux=REQUEST)[1].entropy.square().sum()

    gradient = torch.func.grad(loss)
    run = compiled(torch.vmap(gradient)) if compile else torch.vmap(gradient)
    want = torch.stack([gradient(*one) for one in zip(query, key, strict=True)])
    torch.testing.assert_close(run(query, key), want, rtol=1e-4, atol=1e-5)


def test_of_no_keys_and_no_rows():
    query, none = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 0, 16)
    for q, k in ((query, none), (none, query)):
        _, aux = flex_attention(q, k, k, return_aux=REQUEST)
        assert aux.entropy.tolist() == torch.zeros(1, 2, q.size(2)).tolist()
        assert (aux.max_indices == -1).all() and aux.max_indices.shape == (1, 2, q.size(2))


def test_further_derivatives_are_refused():
    query = torch.randn(1, 1, 5, 16, requires_grad=True)

    def entropy(query):
        return flex_attention(query, query, query, return_aux=REQUEST)[1].entropy.sum()

    (grad,) = torch.autograd.grad(entropy(query), query, create_graph=True)
    with pytest.raises(FlexNotImplementedError, match="entropy has a gradient, but no forward mode"):
        grad.sum().backward()
    with pytest.raises(FlexNotImplementedError, match="entropy has a gradient, but no forward mode"):
        torch.func.jvp(entropy, (query,), (query,))


def test_export_keeps_what_is_asked_for():
    query = torch.randn(1, 2, 20, 16)

    class Model(torch.nn.Module):
        def forward(self, query):
            aux = flex_attention(query, query, query, return_aux=REQUEST)[1]
            return aux.entropy, aux.max_indices

    exported = torch.export.export(Model(), (query,)).module()
    torch.testing.assert_close(exported(query), Model()(query))


@pytest.mark.parametrize("compile", [False, True])
def test_a_score_mod_that_masks(compile):
    """A weight of 0 times a score of -inf is 0, whatever the gradient."""
    query = torch.randn(1, 2, 40, 16, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -math.inf)

    def call(query):
        return flex_attention(query, query, query, score_mod, return_aux=REQUEST)[1].entropy

    got = (compiled(call) if compile else call)(query)
    scores = (query @ query.mT / 4).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    want = entropy_of(scores)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(entropy.mul(-9.0).sum(), query) for entropy in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
