"""Forward mode and second derivatives, against finite differences and dense attention in fp64."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from memory import peak_allocated
from support import Cube, served_by
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from flex_inductor import (
    FlexError,
    Sequences,
    create_block_mask,
    flex_attention,
    set_eager_kernels,
    varlen_attention,
)
from flex_inductor.flash import flash_attn_func
from flex_inductor.masks import library

F = torch.func
LENGTH = 6
HEADS = 4


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def learned(slopes, table):
    """Both captures are used twice, one of them behind a function of the whole tensor."""

    def score_mod(score, b, h, q_idx, kv_idx):
        near = table[h, q_idx - kv_idx + LENGTH]
        return torch.tanh(score * slopes.exp()[h]) * near + near * near - slopes[h] * score

    return score_mod


def captures():
    return numbers(HEADS), numbers(HEADS, 2 * LENGTH)


def qkv(dtype=torch.float64, keys=LENGTH):
    """Grouped heads, and values of another width."""
    shapes = (1, HEADS, LENGTH, 3), (1, 2, keys, 3), (1, 2, keys, 2)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def checks(function, inputs):
    """Along random directions, of which there are as many as inputs."""
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


def from_third(b, h, q_idx, kv_idx):
    """The first two rows are dead."""
    return (q_idx >= 2) & (q_idx >= kv_idx)


MASKS = {
    "none": lambda: None,
    "lists": lambda: create_block_mask(from_third, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=2),
    "runs": lambda: create_block_mask(from_third, None, None, LENGTH, LENGTH, "cpu", 2, compact=True),
    "by head": lambda: create_block_mask(
        lambda b, h, i, j: (i - j).abs() <= h, None, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=4
    ),
}


@pytest.mark.parametrize("mask", ["lists", "by head"])
def test_finite_differences(mask):
    mask = MASKS[mask]()

    def attend(q, k, v, slopes, table):
        return flex_attention(q, k, v, learned(slopes, table), mask, enable_gqa=True)

    checks(attend, (*qkv(), *captures()))


@pytest.mark.parametrize("mask", ["none", "runs"])
def test_finite_differences_with_sinks_and_logsumexp(mask):
    mask = MASKS[mask]()

    def attend(q, k, v, slopes, table, sinks):
        mod = learned(slopes, table)
        return flex_attention(q, k, v, mod, mask, enable_gqa=True, return_lse=True, sinks=sinks)

    checks(attend, (*qkv(), *captures(), numbers(HEADS)))


def test_finite_differences_with_dropout():
    rng_state = torch.tensor(7), torch.tensor(0)

    def attend(q, k, v, slopes, table):
        dropout = {"dropout_p": 0.4, "rng_state": rng_state}
        mod = learned(slopes, table)
        return flex_attention(q, k, v, mod, MASKS["runs"](), enable_gqa=True, **dropout)

    checks(attend, (*qkv(), *captures()))


def test_finite_differences_of_a_window():
    q, k, v = (numbers(2, LENGTH, 2, 3) for _ in range(3))
    checks(lambda *qkv: flash_attn_func(*qkv, causal=True, window_size=(2, 0)), (q, k, v))


@pytest.mark.parametrize("sinks", [False, True])
def test_finite_differences_of_packed_sequences(sinks):
    """One without keys, one without queries, and rows behind the last."""
    sequences = Sequences.from_lengths([3, 0, 2], [4, 1, 0])

    def attend(q, k, v, slopes, table, sinks=None):
        return varlen_attention(q, k, v, sequences, learned(slopes, table), enable_gqa=True, sinks=sinks)

    inputs = numbers(6, HEADS, 3), numbers(5, 2, 3), numbers(5, 2, 2), *captures()
    checks(attend, (*inputs, numbers(HEADS)) if sinks else inputs)


@pytest.mark.parametrize("wanted", [[2], [3], [1, 4]])
def test_finite_differences_of_some_inputs(wanted):
    every = [*qkv(), *captures()]

    def attend(*given):
        inputs = [t.detach() for t in every]
        for place, tensor in zip(wanted, given, strict=True):
            inputs[place] = tensor
        return flex_attention(*inputs[:3], learned(*inputs[3:]), enable_gqa=True, return_lse=True)

    checks(attend, [every[place] for place in wanted])


def ours(q, k, v, slopes, table, sinks, mask):
    mod = learned(slopes, table)
    return flex_attention(q, k, v, mod, mask, enable_gqa=True, return_lse=True, sinks=sinks)


def dense(q, k, v, slopes, table, sinks, mask):
    k, v = (t.repeat_interleave(HEADS // 2, 1) for t in (k, v))
    h, i, j = torch.arange(HEADS).view(-1, 1, 1), torch.arange(LENGTH).view(-1, 1), torch.arange(LENGTH)
    score = learned(slopes, table)(q @ k.mT * q.size(-1) ** -0.5, 0, h, i, j)
    score = score.masked_fill(~mask.mask_mod(0, h, i, j), -torch.inf)
    score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    return score.softmax(-1)[..., :-1] @ v, score.logsumexp(-1)


def loss(attend, mask, *inputs):
    out, lse = attend(*inputs, mask)
    return (out.sin().sum() + lse.cos().sum()).sum()


ALL = tuple(range(6))


def reverse_over_reverse(f, inputs, along):
    def inner(*inputs):
        return sum((grad * to).sum() for grad, to in zip(F.grad(f, ALL)(*inputs), along, strict=True))

    return F.grad(inner, ALL)(*inputs)


DERIVATIVES = {
    "jvp": lambda f, x, along: F.jvp(f, x, along)[1],
    "forward over reverse": lambda f, x, along: F.jvp(F.grad(f, ALL), x, along)[1],
    "reverse over reverse": reverse_over_reverse,
    "reverse over forward": lambda f, x, along: F.grad(lambda *x: F.jvp(f, x, along)[1], ALL)(*x),
    "hessian": lambda f, x, along: F.hessian(f, argnums=3)(*x),
    "jacrev of jacrev": lambda f, x, along: F.jacrev(F.jacrev(f, argnums=3), argnums=5)(*x),
    "vmap": lambda f, x, along: F.vmap(lambda q, to: F.jvp(F.grad(lambda q: f(q, *x[1:])), (q,), (to,))[1])(
        torch.stack([x[0], along[0]]), torch.stack([along[0], x[0]])
    ),
}


def whole(results):
    return torch.cat([t.flatten() for t in torch.utils._pytree.tree_leaves(results)])


def compare(derivatives, dtype, run=lambda function: function):
    mask = MASKS["runs"]()
    inputs = [t.detach() for t in (*qkv(), *captures(), numbers(HEADS))]
    along = [torch.randn_like(t) for t in inputs]
    for derive in derivatives:
        want = whole(derive(functools.partial(loss, dense, mask), tuple(inputs), tuple(along)))
        given = [[t.to(dtype) for t in of] for of in (inputs, along)]
        got = whole(run(derive)(functools.partial(loss, ours, mask), *map(tuple, given)))
        scale, error = want.abs().max(), (got - want).abs().max()
        assert got.dtype == dtype and scale > 0.1
        assert error <= 64 * torch.finfo(dtype).eps * scale, (derive, error / scale)


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_transforms_agree_with_dense_attention(derivative):
    compare([DERIVATIVES[derivative]], torch.float64)


def test_fp32():
    compare([both_orders], torch.float32)


def both_orders(*args):
    return [DERIVATIVES[name](*args) for name in ("forward over reverse", "reverse over reverse")]


def test_transforms_inside_a_compiled_function():
    compiled = torch.compile(backend="flex_inductor", fullgraph=True, options={"route": "chunked"})
    with served_by("chunked"):
        compare([both_orders], torch.float64, compiled)


def hvp(q, to, mod=None, **given):
    """By create_graph=True, with queries, keys and values the same."""
    q = q.detach().requires_grad_()
    (grad,) = torch.autograd.grad(flex_attention(q, q, q, mod, **given).sin().sum(), q, create_graph=True)
    return torch.autograd.grad((grad * to).sum(), q)[0]


def dense_hvp(q, to, mod):
    f = F.grad(lambda q: (mod(q @ q.mT / 2).softmax(-1) @ q).sin().sum())
    return F.grad(lambda q: (f(q) * to).sum())(q)


class Once(Cube):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return Cube.backward(ctx, grad)


def without_grad(score):
    with torch.no_grad():
        weight = score.tanh()
    return score * weight


MODS = {  # what is asked, and the same for dense attention
    "detach": (lambda s: s * s.detach().tanh(), lambda s: s * s.detach().tanh()),
    "no_grad": (without_grad, lambda s: s * s.detach().tanh()),
    "function": (Cube.apply, lambda s: s**3),
    "constant": (lambda s: torch.zeros_like(s), lambda s: s * 0),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("forward", [False, True])
def test_what_a_mod_says_of_its_derivative_holds(mod, forward):
    q, to = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(2))
    mod, plain = MODS[mod]
    if forward:
        grad = F.grad(lambda q: flex_attention(q, q, q, lambda s, *_: mod(s)).sin().sum())
        got = F.jvp(grad, (q,), (to,))[1]
    else:
        got = hvp(q, to, lambda s, *_: mod(s))
    assert torch.allclose(got, dense_hvp(q, to, plain), rtol=1e-11, atol=1e-12)


def test_a_mod_that_has_changed_since_the_forward():
    q, to = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    factor = 2.0

    def score_mod(score, *_):
        return score * score * factor

    (grad,) = torch.autograd.grad(flex_attention(q, q, q, score_mod).sin().sum(), q, create_graph=True)
    factor = 3.0
    got = torch.autograd.grad((grad * to).sum(), q)[0]
    assert torch.allclose(got, dense_hvp(q.detach(), to.detach(), lambda s: s * s * 2.0), rtol=1e-11)


def test_tensors_of_a_mod_are_freed_with_the_graph():
    q = numbers(1, 2, 5, 4)
    bias = torch.randn(5, 5, dtype=torch.float64)
    alive = weakref.ref(bias)
    out = flex_attention(q, q, q, (lambda bias: lambda s, b, h, i, j: s + bias[i, j])(bias))
    del bias
    out.sum().backward()
    gc.collect()
    assert alive() is None and out.requires_grad


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_dead_rows_and_keys_that_nobody_sees(kind):
    """They may hold anything; what is not seen changes nothing, and gets 0."""
    q, k, v = (t.detach().float() for t in qkv(keys=LENGTH))
    q, k, v = (torch.cat([t, t], -1) for t in (q, k, v))
    blind = create_block_mask(
        lambda b, h, i, j: from_third(b, h, i, j) & (j != 1), None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=2
    )
    to = [torch.randn_like(t) for t in (q, k, v)]

    def derivative(q, k, v):
        f = F.grad(lambda *qkv: flex_attention(*qkv, None, blind, enable_gqa=True).sin().sum(), (0, 1, 2))
        if kind == "forward":
            return F.jvp(f, (q, k, v), tuple(to))[1]
        return F.grad(lambda *x: sum((g * t).sum() for g, t in zip(f(*x), to, strict=True)), (0, 1, 2))(
            q, k, v
        )

    clean = derivative(q, k, v)
    q[:, :, :2], k[:, :, 1], v[:, :, 1] = torch.nan, torch.inf, torch.nan
    for got, want in zip(derivative(q, k, v), clean, strict=True):
        assert torch.equal(got, want)
    assert not clean[0][:, :, :2].any() and not clean[1][:, :, 1].any() and not clean[2][:, :, 1].any()
    assert all(t.any() for t in clean)


def test_plain_forward_mode():
    q, to = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(2))
    with forward_ad.dual_level():
        out, lse = flex_attention(forward_ad.make_dual(q, to), q, q, return_lse=True)
        tangents = [forward_ad.unpack_dual(t).tangent for t in (out, lse)]
    _, want = F.jvp(lambda x: ((x @ q.mT / 2).softmax(-1) @ q, (x @ q.mT / 2).logsumexp(-1)), (q,), (to,))
    assert all(torch.allclose(got, t) for got, t in zip(tangents, want, strict=True))


def test_autocast_around_the_derivatives_changes_nothing():
    q, to = (torch.randn(1, 2, 40, 16) for _ in range(2))
    q.requires_grad_()
    found = []
    for enabled in (False, True):
        out = flex_attention(q, q, q)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (grad,) = torch.autograd.grad(out, q, to, create_graph=True)
            found.append((grad, *torch.autograd.grad(grad, q, to)))
    assert all(map(torch.equal, *found))


def test_threads():
    """Of torch, and of Python at the same time: the same bits."""
    q, to = (torch.randn(1, 2, 300, 8) for _ in range(2))
    table = torch.randn(600)
    run = functools.partial(hvp, q, to, lambda s, b, h, i, j: s * table[i - j + 300].tanh())
    want, before = run(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(run(), want)
    finally:
        torch.set_num_threads(before)
    found = []
    threads = [threading.Thread(target=lambda: found.append(run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(got, want) for got in found)


def test_memory_grows_with_tokens():
    length = 8192
    mask = create_block_mask(library.sliding_window(200), None, None, length, length, "cpu")
    q, to = (torch.randn(1, 1, length, 8) for _ in range(2))
    slopes = torch.ones(1, requires_grad=True)
    before = set_eager_kernels("never")
    try:
        run = functools.partial(hvp, q, to, lambda s, b, h, i, j: s * slopes[h].tanh(), block_mask=mask)
        assert peak_allocated(run) < length * length * 4 / 8
    finally:
        set_eager_kernels(before)


def forward_over_forward(q, attend):
    return F.jacfwd(F.jacfwd(attend))(q)


def third(q, attend):
    return F.grad(lambda q: F.grad(lambda q: F.grad(attend)(q).sin().sum())(q).sin().sum())(q)


def of_a_trace(q, attend):
    q.requires_grad_()
    traced = make_fx(lambda q: torch.autograd.grad(attend(q), q)[0])(q)
    return torch.autograd.grad(traced(q).sum(), q)


def marked_once(q, _):
    return hvp(q, q, lambda s, *_: Once.apply(s))


def marked_once_forward(q, _):
    return F.jvp(lambda q: flex_attention(q, q, q, lambda s, *_: Once.apply(s)), (q,), (q,))


REFUSED = {
    third: "has no third derivative",
    forward_over_forward: "no forward-mode derivative of a forward-mode derivative",
    of_a_trace: "traced graph has lost its score_mod",
    marked_once: "marked once_differentiable",
    marked_once_forward: "marked once_differentiable",
}


@pytest.mark.parametrize("ask", REFUSED)
def test_refused(ask):
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    with pytest.raises(FlexError, match=REFUSED[ask]):
        ask(q, lambda q: flex_attention(q, q, q, lambda s, *_: s * s).sin().sum())


def test_torch_refuses_a_second_derivative_from_outside_a_compiled_function():
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    out = torch.compile(lambda q: flex_attention(q, q, q), backend="aot_eager")(q)
    (grad,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_dual_level_inside_of_a_compiled_function_is_refused(fullgraph):
    def along(q, to):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(flex_attention(forward_ad.make_dual(q, to), q, q)).tangent

    def without_tangents(q):
        with forward_ad.dual_level():
            return flex_attention(q, q, q)

    q, to = torch.randn(2, 1, 2, 5, 4)
    with pytest.raises(
        FlexError, match=r"^attention inside of .*dual_level is not served .* Use torch.func.jvp"
    ):
        torch.compile(along, backend="flex_inductor", fullgraph=fullgraph)(q, to)
    out = torch.compile(without_tangents, backend="flex_inductor", fullgraph=fullgraph)(q)
    torch.testing.assert_close(out, flex_attention(q, q, q))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        lambda f, x: torch.autograd.functional.hessian(lambda x: f(x).sin().sum(), x, vectorize=True),
    ],
    ids=["reverse", "forward", "second"],
)
def test_batched_gradients_outside_of_transforms_are_refused(differentiate):
    with pytest.raises(FlexError, match=r"^attention has no batched gradients .* Use torch.func.jacrev"):
        differentiate(lambda x: flex_attention(x, x, x, lambda s, *_: s.tanh()), numbers(1, 1, 3, 2))
