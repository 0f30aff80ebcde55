"""What autograd, torch.func and autocast make of the op."""

import pytest
import torch
from op.calls import check, close, draw, leaf, parameter, qkv

from flex_inductor import AuxRequest, FlexError, create_block_mask, flex_attention
from flex_inductor.op import BackwardCall, hop
from flex_inductor.reference import reference

EVERYTHING = AuxRequest(lse=True, max_scores=True)


@pytest.fixture
def backward_calls(monkeypatch):
    """What each backward was asked for and gave: (wants, names of captures with a gradient)."""
    calls = []
    run = hop.AttentionBackward.__call__

    def spy(self, *args):
        grads = run(self, *args)
        calls.append((BackwardCall.read(*args).wants, [grad is not None for grad in grads[3]]))
        return grads

    monkeypatch.setattr(hop.AttentionBackward, "__call__", spy)
    return calls


@pytest.mark.parametrize("wants", ["q", "k", "v", "qk", "kv", "", "qkv"])
def test_only_what_requires_grad_is_computed(wants, backward_calls):
    inputs = [draw(2, 2, 6, 4).requires_grad_(name in wants) for name in "qkv"]
    learnt, fixed = parameter(6), draw(6)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + learnt[q_idx] * fixed[kv_idx]

    check(lambda q, k, v: flex_attention(q, k, v, score_mod), inputs, [learnt], score_mod)
    names = tuple(name for name in ("query", "key", "value") if name[0] in wants)
    assert backward_calls[-1] == (names, [True, False])


def test_no_backward_where_nothing_requires_grad():
    assert not flex_attention(*(t.detach() for t in qkv())).requires_grad


def test_logsumexp_has_a_gradient():
    inputs, bias = qkv(), parameter(6)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 6, 6, "cpu", BLOCK_SIZE=4)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * bias[kv_idx]

    def loss(out, lse):
        return out.sin().sum() + lse.cos().sum()

    ours = loss(*flex_attention(*inputs, score_mod, mask, return_lse=True))
    expected = loss(*reference(*inputs, score_mod, mask)[:2])
    leaves = [*inputs, bias]
    close(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves))


def test_gradient_of_logsumexp_alone():
    q, k, v = qkv()
    _, lse = flex_attention(q, k, v, return_lse=True)
    expected = torch.autograd.grad(reference(q, k, v)[1].sin().sum(), (q, k))
    close(torch.autograd.grad(lse.sin().sum(), (q, k)), expected)


def test_max_scores_has_no_gradient():
    out, aux = flex_attention(*qkv(), return_aux=EVERYTHING)
    assert out.requires_grad and aux.lse.requires_grad and not aux.max_scores.requires_grad


def test_gradcheck():
    inputs = qkv(1, 2, 4, 2)
    slopes, table, temperature = parameter(2), parameter(2, 4), parameter()
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 4, 4, "cpu", BLOCK_SIZE=2)

    def attend(q, k, v, slopes, table, temperature):
        def score_mod(score, b, h, q_idx, kv_idx):
            near = table[h, q_idx] + table[h, (q_idx - kv_idx).abs()]
            return torch.tanh(score * temperature) + slopes[h] * (q_idx - kv_idx) + near

        return flex_attention(q, k, v, score_mod, mask, return_lse=True)

    assert torch.autograd.gradcheck(attend, (*inputs, slopes, table, temperature), fast_mode=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_detect_anomaly(compiled):
    """It looks for NaN in what every backward gives, and leaves that of a mod's trace alone."""
    inputs, bias = qkv(), parameter(6)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * bias[kv_idx]

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod)

    with torch.autograd.detect_anomaly():
        check(torch.compile(attend, backend="aot_eager") if compiled else attend, inputs, [bias], score_mod)
        out = attend(*inputs)
        with pytest.raises(RuntimeError, match="returned nan values"):
            torch.autograd.grad(out, bias, torch.full_like(out, torch.nan))


def biased(attend):
    def loss(q, k, v, slopes, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (q_idx - kv_idx) + table[q_idx, kv_idx]

        return attend(q, k, v, score_mod).sin().sum()

    return loss


def dense(*args):
    return reference(*args)[0]


def test_func_grad_equals_autograd():
    args = [draw(2, 2, 6, 4), draw(2, 2, 6, 4), draw(2, 2, 6, 4), draw(2), draw(6, 6)]
    leaves = [leaf(a) for a in args]
    expected = torch.autograd.grad(biased(dense)(*leaves), leaves)
    close(torch.func.grad(biased(flex_attention), tuple(range(5)))(*args), expected)


def test_func_grad_and_value_and_vjp():
    args = [draw(2, 2, 6, 4), draw(2, 2, 6, 4), draw(2, 2, 6, 4), draw(2), draw(6, 6)]
    grads, value = torch.func.grad_and_value(biased(flex_attention), (0, 3))(*args)
    close(value, biased(dense)(*args))
    out, pull = torch.func.vjp(lambda q, k, v: flex_attention(q, k, v), *args[:3])
    leaves = [leaf(a) for a in args[:3]]
    close(pull(torch.ones_like(out)), torch.autograd.grad(dense(*leaves).sum(), leaves))
    jacobian = torch.func.jacrev(lambda slopes: biased(flex_attention)(*args[:3], slopes, args[4]))(args[3])
    close(jacobian, grads[1])


def test_functional_call_gives_gradients_of_parameters():
    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(draw(2))

        def forward(self, q, k, v):
            return flex_attention(q, k, v, lambda score, b, h, i, j: score + self.slopes[h] * (i - j))

    module, inputs = Attend(), [draw(2, 2, 6, 4) for _ in range(3)]

    def loss(parameters):
        return torch.func.functional_call(module, parameters, tuple(inputs)).sin().sum()

    expected = torch.autograd.grad(module(*inputs).sin().sum(), module.slopes)[0]
    assert expected.abs().sum() > 0
    close(torch.func.grad(loss)({"slopes": module.slopes.detach()})["slopes"], expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    inputs, bias = qkv(), parameter(6)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 6, 6, "cpu", BLOCK_SIZE=4)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * bias[kv_idx]

    with context():
        out, lse = flex_attention(*inputs, score_mod, mask, return_lse=True)
        assert not out.requires_grad and not lse.requires_grad
        assert out.is_inference() == torch.is_inference_mode_enabled()
        close((out, lse), reference(*inputs, score_mod, mask)[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_as_with_sdpa(dtype):
    inputs = [torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3)]
    mixed = [inputs[0], inputs[1].to(torch.bfloat16), inputs[2]]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", dtype):
        for call in (inputs, mixed):
            ours, theirs = flex_attention(*call), sdpa(*call)
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
            for grad in torch.autograd.grad(ours.sum(), inputs):
                assert grad.dtype == torch.float32


def test_autocast_leaves_fp64_beside_other_dtypes_refused():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(FlexError, match="must have the same dtype"):
        flex_attention(query, key, key)
