"""Ops in mods that kernels cannot hold, or that tracing could trip over: served by some route, and right."""

import pytest
import torch
from op.calls import qkv

import flex_inductor
from flex_inductor import flex_attention, supported
from flex_inductor.errors import FlexNotImplementedError
from flex_inductor.reference import reference


def power_of_two(score, b, h, q_idx, kv_idx):
    return score / 2 ** (h + 1)


def power_of_indices(score, b, h, q_idx, kv_idx):
    return score + q_idx ** kv_idx.clamp(max=3) / 64


def literal_table(score, b, h, q_idx, kv_idx):
    return score * torch.tensor([1.0, 0.5])[h]


@pytest.mark.parametrize(
    "score_mod, route",
    [
        (power_of_two, "chunked"),
        (power_of_indices, "chunked"),
        (literal_table, "cpu"),
    ],
)
def test_forward_and_backward(score_mod, route):
    inputs = [t.detach().float().requires_grad_() for t in qkv()]
    flex_inductor.decisions(clear=True)
    attend = torch.compile(lambda *a: flex_attention(*a, score_mod), backend="flex_inductor", fullgraph=True)
    out = attend(*inputs)
    expected = reference(*inputs, score_mod)[0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs)
    )
    assert [decision.chosen for decision in flex_inductor.decisions()] == [route] * 2


def test_bounds_by_keyword():
    query, key, value = (t.detach() for t in qkv())
    bounded = flex_attention(query, key, value, lambda score, *_: torch.clamp(input=score, min=0.25))
    torch.testing.assert_close(bounded, reference(query, key, value, lambda score, *_: score.clamp(0.25))[0])


def test_containers_that_contain_themselves():
    tables = [torch.randn(3)]
    tables.append(tables)
    found = {"tables": tables}
    found["found"] = found
    query, key, value = (t.detach() for t in qkv())
    shifted = flex_attention(
        query, key, value, lambda score, *_: score + tables[0][1] + found["tables"][0][0]
    )
    torch.testing.assert_close(shifted, reference(query, key, value)[0])  # the same for all of a row


def test_a_variable_without_a_value():
    def mod(score, b, h, q_idx, kv_idx):
        return score if score.dim() == 0 else score + later

    query, key, value = (t.detach() for t in qkv())
    torch.testing.assert_close(flex_attention(query, key, value, mod), reference(query, key, value)[0])
    later = 1


def test_complex_captures():
    waves, query = torch.randn(6, dtype=torch.complex64, requires_grad=True), torch.randn(1, 2, 6, 4)

    def mod(score, b, h, q_idx, kv_idx):
        turned = waves[kv_idx] * waves[q_idx].conj() * torch.polar(torch.ones(()), score.float() / 3)
        return score + turned.real + waves[kv_idx].abs() + (waves * waves).sum().imag * score / 9

    def loss(waves, attend=flex_attention):
        return attend(query, query, query, mod).sin().sum()

    scores = query @ query.mT / 2
    turned = waves * waves[:, None].conj() * torch.polar(torch.ones(()), scores / 3)
    scores = scores + turned.real + waves.abs() + (waves * waves).sum().imag * scores / 9
    (want,) = torch.autograd.grad((scores.softmax(-1) @ query).sin().sum(), waves)
    flex_inductor.decisions(clear=True)
    compiled = torch.compile(flex_attention, backend="flex_inductor")
    torch.testing.assert_close(torch.autograd.grad(loss(waves), waves)[0], want)
    out = loss(waves, compiled)
    if supported.TORCH < (2, 13):  # its decompositions of complex numbers cannot be batched
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.autograd.grad(out, waves)
    else:
        torch.testing.assert_close(torch.autograd.grad(out, waves)[0], want)
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["chunked"] * 2


def test_one_hot_of_an_index():
    weights, query = torch.randn(4), torch.randn(1, 2, 6, 4)

    def mod(score, b, h, q_idx, kv_idx):
        return score + (torch.nn.functional.one_hot(kv_idx % 4, 4) * weights).sum()

    want = reference(query, query, query, lambda score, b, h, q_idx, kv_idx: score + weights[kv_idx % 4])[0]
    torch.testing.assert_close(flex_attention(query, query, query, mod), want)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q_idx, kv_idx: score + torch.vmap(lambda x: x * 2)(torch.ones(3) * q_idx).sum(),
        lambda score, b, h, q_idx, kv_idx: score + torch.func.grad(lambda x: x**3)(score),
    ],
    ids=["vmap", "grad"],
)
def test_transforms_in_a_mod_are_refused_by_name(mod):
    query = torch.randn(1, 2, 6, 4)
    with pytest.raises(FlexNotImplementedError, match=r"^score_mod calls a transform of torch\.func"):
        flex_attention(query, query, query, mod)
