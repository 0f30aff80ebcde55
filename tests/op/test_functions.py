"""Mods with autograd.Functions: a backward written by hand is the backward, whoever needs which gradient."""

import pytest
import torch
from op.calls import close, draw
from support import served_by
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flex_inductor
from flex_inductor import FlexError, create_block_mask, flex_attention

MASK = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 6, 6, "cpu", BLOCK_SIZE=2)


class Rounded(torch.autograd.Function):
    """Quarters, with the gradient of the unrounded value."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundedProduct(torch.autograd.Function):
    """A number among the arguments, saved tensors, a gradient that is None, and context that is set up apart."""

    @staticmethod
    def forward(x, factor, steps):
        return torch.round(x * factor * steps) / steps

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        x, factor = ctx.saved_tensors
        return grad * factor, grad * x if ctx.needs_input_grad[1] else None, None


class Halved(torch.autograd.Function):
    """The same tensor, with half its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Opaque(torch.autograd.Function):
    """An op that has no derivative of its own."""

    @staticmethod
    def forward(x):
        return torch.ops.flex_inductor_tests.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (tanh,) = ctx.saved_tensors
        return grad * (1 - tanh * tanh)


@torch.library.custom_op("flex_inductor_tests::tanh", mutates_args=())
def _tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


_tanh.register_fake(torch.empty_like)
_tanh.register_vmap(lambda info, in_dims, x: (torch.tanh(x), in_dims[0]))

halved = Halved.apply  # as many programs keep it


def by_name(function, x, factor):
    """`apply` with names, which torch before 2.13 does not take."""
    takes_names = torch.__version__ >= "2.13"
    return function.apply(x, steps=8, factor=factor) if takes_names else function.apply(x, factor, 8)


MODS = {
    "score": lambda t: lambda s, b, h, i, j: Rounded.apply(s) + t[j],
    "opaque": lambda t: lambda s, b, h, i, j: 2 * Opaque.apply(s / 2) + t[j],
    "capture": lambda t: lambda s, b, h, i, j: s + Rounded.apply(t[i]) * Rounded.apply(t)[j],
    "both": lambda t: lambda s, b, h, i, j: RoundedProduct.apply(s, t[j], 4),
    "kept": lambda t: lambda s, b, h, i, j: halved(s) * halved(t)[j],
    "several": lambda t: (
        lambda s, b, h, i, j: (
            by_name(RoundedProduct, Rounded.apply(s), Rounded.apply(t[i])) + Halved.apply(t)[j]
        )
    ),
}


def dense(q, k, v, score_mod):
    """Without vmap, which most Functions know nothing of."""
    lanes = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.size(2))), indexing="ij")
    score = score_mod(q @ k.mT * q.size(-1) ** -0.5, *lanes)
    return torch.softmax(score.masked_fill(lanes[2] < lanes[3], -torch.inf), -1) @ v


def inputs_for(wants, dtype=torch.float64):
    """Query, key, value and a captured table, of which those in `wants` need a gradient."""
    shapes = [(1, 2, 6, 4)] * 3 + [(6,)]
    return [
        draw(*shape).to(dtype).requires_grad_(n in wants) for n, shape in zip("qkvt", shapes, strict=True)
    ]


def gradients(attend, make, inputs):
    q, k, v, t = inputs
    out = attend(q, k, v, make(t))
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    return out, torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)


def attend(q, k, v, score_mod):
    return flex_attention(q, k, v, score_mod, MASK)


HOW = {"eager": attend, "compiled": torch.compile(attend, backend="aot_eager", fullgraph=True)}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("wants", ["k", "qkvt"])
def test_whatever_the_function_is_on(name, how, wants):
    inputs = inputs_for(wants)
    close(gradients(HOW[how], MODS[name], inputs), gradients(dense, MODS[name], inputs))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wants", ["q", "t", "v", "vt"])
def test_whoever_needs_a_gradient(how, wants):
    def both(t):
        return lambda *lane: MODS["opaque"](t)(MODS["several"](t)(*lane), *lane[1:])

    inputs = inputs_for(wants)
    close(gradients(HOW[how], both, inputs), gradients(dense, both, inputs))


def test_kernels_have_the_backward():
    compiled = torch.compile(attend, backend="flex_inductor", fullgraph=True)
    inputs = inputs_for("qkvt", torch.float32)
    flex_inductor.decisions(clear=True)
    got = gradients(compiled, MODS["score"], inputs)
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu", "cpu"]
    torch.testing.assert_close(got, gradients(dense, MODS["score"], inputs))


def test_a_changed_backward_is_no_stale_kernel():
    """The forward graph stays the same, and so would a cache's key if it looked no further."""
    inputs = inputs_for("qkv")

    def gradients_with(factor):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return torch.round(x)

            @staticmethod
            def backward(ctx, grad):
                return grad * factor

        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="flex_inductor", fullgraph=True)
        make = lambda t: lambda s, b, h, i, j: Scaled.apply(s)  # noqa: E731
        return gradients(compiled, make, inputs)[1]

    once, twice = gradients_with(1.0), gradients_with(2.0)
    close(twice[:2], [2 * grad for grad in once[:2]])


def test_no_gradient_then_gradient_then_none():
    compiled = HOW["compiled"]
    inputs = inputs_for("qkt")
    expected, grads = gradients(dense, MODS["several"], inputs)
    mod = MODS["several"](inputs[3])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            close(compiled(*inputs[:3], mod), expected.detach())
        close(gradients(compiled, MODS["several"], inputs)[1], grads)
    again = torch.utils.checkpoint.checkpoint(compiled, *inputs[:3], mod, use_reentrant=True)
    again.sin().sum().backward()
    close([inputs[n].grad for n in (0, 1, 3)], list(grads))


def test_through_torchs_own_op(monkeypatch):
    """Its wrapper refuses gradients on CPU before there is an op: not here, as on a GPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    compiled = torch.compile(torch_flex.flex_attention, backend="flex_inductor", fullgraph=True)
    inputs = inputs_for("k")
    with served_by("chunked", "chunked"):
        got = gradients(lambda q, k, v, mod: compiled(q, k, v, mod, MASK), MODS["score"], inputs)
    close(got, gradients(dense, MODS["score"], inputs))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_refused_inside_a_compiled_transform(fullgraph):
    q, k, v, t = (tensor.detach() for tensor in inputs_for(""))
    grad = torch.func.grad(lambda q: attend(q, k, v, MODS["score"](t)).sum())
    with pytest.raises(
        FlexError, match=r"^score_mod applies the autograd.Function `Rounded` inside a torch.func tran"
    ):
        torch.compile(grad, backend="aot_eager", fullgraph=fullgraph)(q)


class Counting(torch.autograd.Function):
    """Writes to a tensor that it is given."""

    @staticmethod
    def forward(ctx, x, seen):
        seen.add_(1)
        ctx.mark_dirty(seen)
        return 2 * x, seen

    @staticmethod
    def backward(ctx, grad, _):
        return 2 * grad, None


@pytest.mark.parametrize("how", HOW)
def test_a_capture_that_a_function_changes(how):
    q, k, v, _ = inputs_for("q")
    seen = torch.zeros(6, dtype=torch.float64)
    with pytest.raises(Exception, match="score_mod changes the captured tensor `seen` in place"):
        HOW[how](q, k, v, lambda s, b, h, i, j: Counting.apply(s, seen)[0])
    assert not seen.any()
