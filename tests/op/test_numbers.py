"""Python numbers that a mod reads and that change from call to call: two compiles, then none."""

import functools
import types

import pytest
import torch
from op.calls import check, close, parameter, qkv
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import leaky_relu

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.masks import library
from flex_inductor.reference import reference
from tests.marks import slow_but

in_a_global = 0
FLOATS, INTEGERS = (0.5, 0.75, 1.25, 0.375), (2, 3, 5, 4)


class Places:
    """A number in every place where a mod can find one."""

    def __init__(self):
        self.module = torch.nn.Module()
        self.module.nested, self.module.listed, self.module.named = types.SimpleNamespace(), [0], {}

    def put(self, number):
        global in_a_global
        in_a_global = self.module.nested.number = self.module.listed[0] = self.module.named["number"] = number
        self.module.number, self.module.pair = number, (number, 0)
        self.score_mod = functools.partial(self.score_mod_with(number), given=number)

    def score_mod_with(self, closed):
        module = self.module

        def score_mod(score, b, h, q_idx, kv_idx, default=closed, given=0):
            score = score * given + module.number + module.nested.number * q_idx + module.pair[0] * kv_idx
            return score * module.listed[0] - module.named["number"] * h + in_a_global * b + closed / default

        return score_mod

    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx + self.module.number + self.module.pair[0] > kv_idx * in_a_global


def mask_of(mask_mod):
    return create_block_mask(mask_mod, None, None, 6, 6, "cpu", BLOCK_SIZE=4)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("numbers", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_a_number_may_change_wherever_a_mod_finds_it(numbers, fullgraph, dynamic):
    places, counter, counts = Places(), CompileCounterWithBackend("aot_eager"), []

    @torch.compile(backend=counter, fullgraph=fullgraph, dynamic=dynamic)
    def attend(q, k, v):
        return flex_attention(q, k, v, places.score_mod, mask_of(places.mask_mod))

    for number in numbers:
        places.put(number)
        check(attend, qkv(), (), places.score_mod, mask_of(places.mask_mod))
        counts.append(counter.frame_count)
    assert counts[0] == 1 and counts[1:] == [counts[1]] * 3 and counts[1] <= 2


def test_a_float_of_both_mods_and_of_what_follows():
    holder, counter = types.SimpleNamespace(), CompileCounterWithBackend("aot_eager")
    score_mod = lambda score, b, h, q_idx, kv_idx: score * holder.factor  # noqa: E731
    mask = mask_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx * holder.factor >= kv_idx

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod, mask) * holder.factor

    for holder.factor in FLOATS:
        inputs = qkv()
        close(attend(*inputs), reference(*inputs, score_mod, mask)[0] * holder.factor)
    assert counter.frame_count == 2


def test_the_fused_kernel_takes_numbers_that_change():
    holder, counter = types.SimpleNamespace(), CompileCounterWithBackend("flex_inductor")
    score_mod = lambda score, b, h, q_idx, kv_idx: score * holder.factor  # noqa: E731
    attend = torch.compile(
        lambda q, k, v, scale: flex_attention(q, k, v, score_mod, scale=scale),
        backend=counter,
        fullgraph=True,
    )
    flex_inductor.decisions(clear=True)
    for holder.factor, scale in zip(FLOATS, INTEGERS, strict=True):
        inputs = [t.detach().float().requires_grad_() for t in qkv()]
        out, expected = attend(*inputs, scale), reference(*inputs, score_mod, scale=scale)[0]
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        )
    assert counter.frame_count == 2
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu"] * 4


@pytest.mark.parametrize("scale", slow_but(["inf", "-inf", "nan"], "-inf"))
def test_a_scale_that_is_not_finite(scale):
    scale = float(scale)
    inputs = [t.detach().float() for t in qkv()]
    flex_inductor.decisions(clear=True)
    attend = torch.compile(
        lambda *a: flex_attention(*a, scale=scale), backend="flex_inductor", fullgraph=True
    )
    torch.testing.assert_close(attend(*inputs), flex_attention(*inputs, scale=scale), equal_nan=True)
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu"]


class Shifted(torch.autograd.Function):
    """A number scales, and scales the gradient otherwise."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x + number * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.number, None


@pytest.mark.parametrize("numbers", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_a_number_that_a_function_takes(numbers):
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, number):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: Shifted.apply(score, number))

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for number in numbers:
        inputs = qkv()
        out, expected = compiled(*inputs, number), attend(*inputs, number)
        close(out, expected)
        close(torch.autograd.grad(out.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs))
    assert counter.frame_count == 2


def cuts(table, number):
    return lambda score, b, h, q_idx, kv_idx: score + table[number:][kv_idx]


def picks(table, number):
    return lambda score, b, h, q_idx, kv_idx: score * table[number] + table.view(2, -1)[b, number]


def counts_up(table, number):
    return lambda score, b, h, q_idx, kv_idx: score + torch.arange(number).sum() * table[: 2 * number].sum()


@pytest.mark.parametrize("make", [cuts, picks, counts_up])
def test_a_size_that_changes(make):
    table, counter = parameter(14), CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v, number):
        return flex_attention(q, k, v, make(table, number))

    for number in INTEGERS:
        check(lambda *a, n=number: attend(*a, n), qkv(), [table], make(table, number))
    assert counter.frame_count == 2


def test_a_number_where_no_tensor_can_be_is_a_constant():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v, slope):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: leaky_relu(score, slope))

    for slope in FLOATS[:3]:
        equivalent = lambda score, b, h, q_idx, kv_idx, slope=slope: leaky_relu(score, slope)  # noqa: E731
        check(lambda *a, slope=slope: attend(*a, slope), qkv(), (), equivalent)


def test_a_tree_after_a_growing_context():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v, context):
        return flex_attention(q, k, v, block_mask=mask_of(library.tree([-1, 0, 0], context)))

    for context in (2, 3, 4):
        mask = mask_of(library.tree([-1, 0, 0], context))
        check(lambda *a, context=context: attend(*a, context), qkv(), (), None, mask)
    assert counter.frame_count == 2


def test_writes_to_values_of_its_own():
    def score_mod(score, b, h, q_idx, kv_idx):
        doubled = score.clone()
        doubled.mul_(2)
        doubled += kv_idx
        return doubled

    equivalent = lambda score, b, h, q_idx, kv_idx: score * 2 + kv_idx  # noqa: E731
    check(torch.compile(lambda *a: flex_attention(*a, score_mod), backend="aot_eager"), qkv(), (), equivalent)
