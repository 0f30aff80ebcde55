"""options={"verify": True}: kernels that are wrong are found out when they run, and right ones are left alone."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.lowering  # before the template, which it imports as well
from torch._functorch import config as functorch_config
from torch._inductor import config

from flex_inductor import FlexError
from flex_inductor.lowerings.cpu import template
from flex_inductor.op import verify
from flex_inductor.op.program import split
from flex_inductor.op.tracing import MASK_LANES, trace_mod
from flex_inductor.reference import reference
from tests import inspected


@pytest.fixture
def breaking(monkeypatch):
    """Lets a test change what templates render; nothing compiled meanwhile comes from a cache, or goes there."""
    source = template.source

    def change(name, right, wrong):
        def render(**values):
            text = source(name).render(**values)
            assert right in text
            return text.replace(right, wrong)

        monkeypatch.setattr(
            template,
            "source",
            lambda other: SimpleNamespace(render=render) if other == name else source(other),
        )

    torch._dynamo.reset()
    with config.patch({"fx_graph_cache": False}), functorch_config.patch({"enable_autograd_cache": False}):
        yield change


def compiled():
    module, args = inspected.learnable_bias()
    args = [torch.randn_like(tensor, dtype=torch.float32).requires_grad_() for tensor in args]
    return torch.compile(module, backend="flex_inductor", options={"verify": True}), args


def test_right_kernels_pass():
    attend, args = compiled()
    out = attend(*args)
    want, _, _ = reference(*args, attend.relative, attend.mask)
    torch.testing.assert_close(out, want)
    (grad,) = torch.autograd.grad(out.sum(), args[0])
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), args[0])[0], rtol=1e-4, atol=1e-5)


def test_a_broken_forward_is_found(breaking):
    breaking("forward.jinja", "lanes(scores, q0 + r0,", "lanes(scores, q0 + r0 + (q0 >= 128 ? 1 : 0),")
    attend, args = compiled()
    with pytest.raises(FlexError) as found:
        attend(*args)
    assert re.match(
        r"verify: out is wrong in batch 0, head 0, queries 128 to 255\. At \[0, 0, \d+, \d+\] the kernel gives \S+ and "
        r"the reference in float64 \S+, where rounding allows for \S+\. It is a fault of flex_inductor: ",
        str(found.value),
    )
    assert "Inlined:\n  def score_mod(score, b, h, q_idx, kv_idx" in str(found.value)
    assert "torch.ops.aten.tanh.default(" in str(found.value)


def test_a_broken_backward_is_found(breaking):
    breaking("backward.jinja", "const float scale = ", "const float scale = 1.01f * ")
    attend, args = compiled()
    out = attend(*args)
    with pytest.raises(FlexError, match=r"^verify: d_q is wrong in batch 0, head 0, queries 0 to 127\. "):
        out.sum().backward()


def op_arguments(rows=1024):
    q, k, v = (torch.randn(1, 2, rows, 16) for _ in range(3))
    mask_mod = split(trace_mod(inspected.causal, MASK_LANES, q, ()), MASK_LANES, guarded=False).to_text()
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    return (
        [q, k, v, "", [], [], "", mask_mod, 0.25, [], [], ""],
        torch.softmax(scores, -1) @ v,
        scores.logsumexp(-1),
    )


@pytest.mark.parametrize("row", [0, 1023])
def test_large_calls_are_sampled_at_both_ends(row, monkeypatch):
    monkeypatch.setattr(verify, "WHOLE_LANES", 0)
    arguments, out, lse = op_arguments()
    state = torch.get_rng_state()
    checked = torch.ops.flex_inductor.verified_forward(*arguments, out, lse, None)
    assert torch.equal(checked, out) and checked is not out
    assert torch.equal(torch.get_rng_state(), state)
    lse[0, 1, row] += 1e-3
    first = row // 128 * 128
    with pytest.raises(
        FlexError, match=rf"^verify: lse is wrong in batch 0, head 1, queries {first} to {first + 127}\."
    ):
        torch.ops.flex_inductor.verified_forward(*arguments, out, lse, None)


def test_what_is_not_a_number_is_wrong():
    arguments, out, lse = op_arguments(128)
    out[0, 1, 5, 3] = torch.nan
    with pytest.raises(FlexError, match=r"At \[0, 1, 5, 3\] the kernel gives nan and"):
        torch.ops.flex_inductor.verified_forward(*arguments, out, lse, None)


def test_bad_option():
    compiled = torch.compile(lambda x: x + 1, backend="flex_inductor", options={"verify": 1})
    with pytest.raises(Exception, match=r"options\['verify'\] is 1; expected True or False\."):
        compiled(torch.zeros(1))
