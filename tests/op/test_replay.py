"""A second eager call of a mod is not traced, and whatever its Python reads anew is heeded."""

import contextlib
import functools
import gc
import itertools
import random
import threading
import types
import weakref

import pytest
import torch
from op.calls import draw, parameter, qkv
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from flex_inductor import flex_attention
from flex_inductor.kept import Kept
from flex_inductor.mod_ir import checks, replay
from flex_inductor.reference import reference

query, key, value = qkv()
LENGTHS = (query.size(-2), key.size(-2))
FACTOR = 0.5


@pytest.fixture
def traced(monkeypatch):
    """The graphs that have been traced, by what they are of."""
    seen = []
    monkeypatch.setattr(replay, "_points", Kept(replay.MOST_POINTS))
    monkeypatch.setattr(replay, "_ends", Kept(replay.MOST_TRACES))

    def counting(name):
        trace = getattr(checks, name)

        def run(*args):
            seen.append(name)
            return trace(*args)

        monkeypatch.setattr(checks, name, run)

    counting("trace_value"), counting("trace_joint")
    return seen


def same_as_dense(mod, block_mask=None, wanted=()):
    """Output and gradients of an eager call are those of dense attention."""
    q, k, v = (t.clone().requires_grad_() for t in (query, key, value))
    results = [
        flex_attention(q, k, v, mod, block_mask),
        reference(q, k, v, mod, block_mask)[0],
    ]
    grads = [torch.autograd.grad(out.pow(2).sum(), (q, k, v, *wanted)) for out in results]
    for ours, dense in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-10)


def test_a_second_call_is_not_traced(traced):
    slopes = parameter(query.size(1))
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, *LENGTHS, device="cpu")

    def layer(slopes):
        def mod(score, b, h, q_idx, kv_idx):
            distance = (q_idx - kv_idx).abs()
            return torch.where(distance < 4, score - slopes[h] * distance, torch.tanh(score))

        return mod  # another function each time

    same_as_dense(layer(slopes), mask, [slopes])
    first = list(traced)
    assert sorted(first) == ["trace_joint", "trace_value", "trace_value"]
    other = parameter(query.size(1))
    same_as_dense(layer(slopes), mask, [slopes])
    same_as_dense(layer(other), mask, [other])
    assert traced == first
    with torch.no_grad():
        flex_attention(query, key, value, layer(slopes.detach()), mask)  # which needs no gradient
    assert traced == [*first, "trace_value"]


class Settings:
    factor = 0.5


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.table = 0.5, torch.nn.Parameter(draw(8))
        self.settings = {"factors": [0.5]}

    def by_attribute(self, score, b, h, q_idx, kv_idx):
        return score * self.factor

    def in_a_container(self, score, b, h, q_idx, kv_idx):
        return score * self.settings["factors"][-1]


def closure_cell():
    factor = 0.5

    def mod(score, b, h, q_idx, kv_idx):
        return score * factor

    def change(to):
        nonlocal factor
        factor = to

    return mod, change


def default_argument():
    def mod(score, b, h, q_idx, kv_idx, factor=0.5):
        return score * factor

    return mod, lambda to: setattr(mod, "__defaults__", (to,))


def global_variable():
    return (lambda score, b, h, q_idx, kv_idx: score * FACTOR), lambda to: globals().update(FACTOR=to)


def global_of_a_helper():
    def helper(score):
        return score * FACTOR

    return (lambda score, b, h, q_idx, kv_idx: helper(score)), lambda to: globals().update(FACTOR=to)


def module_attribute():
    holder = Holder()
    return holder.by_attribute, lambda to: setattr(holder, "factor", to)


def dict_of_lists():
    holder = Holder()
    return holder.in_a_container, holder.settings["factors"].append


def class_attribute():
    return (lambda score, b, h, q_idx, kv_idx: score * Settings.factor), lambda to: setattr(
        Settings, "factor", to
    )


def name_made_up():
    holder = Holder()
    return (
        lambda score, b, h, q_idx, kv_idx: score * getattr(holder, "fac" + "tor"),
        lambda to: setattr(holder, "factor", to),
    )


def which_branch():
    holder = types.SimpleNamespace(factor=0.5)

    def mod(score, b, h, q_idx, kv_idx):
        return score * 0.5 if holder.factor == 0.5 else torch.sin(score)

    return mod, lambda to: setattr(holder, "factor", to)


def table_written_out():
    holder = types.SimpleNamespace(factor=0.5)

    def mod(score, b, h, q_idx, kv_idx):
        return score * torch.tensor([holder.factor, 1.0], dtype=score.dtype)[h % 2]

    return mod, lambda to: setattr(holder, "factor", to)


def keyword():
    holder = types.SimpleNamespace(factor=0.5)
    return (
        lambda score, b, h, q_idx, kv_idx: torch.add(score, kv_idx, alpha=holder.factor),
        lambda to: setattr(holder, "factor", to),
    )


def which_operand():
    holder = types.SimpleNamespace(factor=0.5)

    def mod(score, b, h, q_idx, kv_idx):
        return score * (kv_idx if holder.factor == 0.5 else q_idx)

    return mod, lambda to: setattr(holder, "factor", to)


CHANGING = (
    which_operand, closure_cell, default_argument, global_variable, global_of_a_helper, module_attribute, dict_of_lists,
    class_attribute, name_made_up, which_branch, table_written_out, keyword,
)  # fmt: skip


@pytest.mark.parametrize("make", CHANGING, ids=lambda make: make.__name__)
def test_what_the_mod_reads_may_change(make, traced):
    mod, change = make()
    for factor in (0.5, 0.25, 0.5, -0.0, 0.0):
        change(factor)
        same_as_dense(mod)
    before = len(traced)
    change(0.25)
    same_as_dense(mod)
    assert len(traced) == before


def test_zeros_differ_by_their_sign_and_numbers_by_their_type():
    for number in (0.0, -0.0, 0, False, 1, True, 1.0):

        def mod(score, b, h, q_idx, kv_idx, number=number):
            rounded = (kv_idx * number + (2**24 + 1)) - 2**24  # where it is a float
            return score + 0.1 * rounded + (1 / ((kv_idx * 0.0 + 1) * number)).clamp(-2, 2) * kv_idx

        out, lse = flex_attention(query, key, value, mod, return_lse=True)
        expected = reference(query, key, value, mod)
        torch.testing.assert_close((out, lse), expected[:2])


def test_tensors_may_change_their_shape_dtype_order_and_identity(traced):
    heads = query.size(1)
    one, other, longer = parameter(heads), parameter(heads), parameter(heads + 3)
    same = [one, one]
    tables = []

    def mod(score, b, h, q_idx, kv_idx):
        return score * tables[0][h] + tables[1][h] * q_idx

    for tables[:], wanted in (
        ([one, other], [one, other]), ([other, one], [one, other]), (same, [one]), ([one, other], [one, other]),
        ([longer, other], [longer, other]), ([draw(heads), other], [other]),
        ([torch.arange(heads), other], [other]), ([one, one.detach()], [one]),
    ):  # fmt: skip
        same_as_dense(mod, None, wanted)
        before = len(traced)
        same_as_dense(mod, None, wanted)
        assert len(traced) == before


def test_a_mod_that_draws_lots_gets_the_graph_of_its_own_run():
    """Its runs for one call differ: nothing may be kept under another run's name."""
    factors = itertools.cycle([2.0, 3.0, 5.0, 7.0, 11.0])
    for _ in range(20):
        flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: score * next(factors))
    for factor in (2.0, 3.0, 5.0, 7.0, 11.0):
        same_as_dense(lambda score, b, h, q_idx, kv_idx: score * factor)  # noqa: B023


def test_a_function_is_traced_each_time(traced):
    scale = types.SimpleNamespace(backward=3.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, score):
            return score * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * scale.backward

    def d_query(factor):
        scale.backward = factor
        q = query.clone().requires_grad_()
        out = flex_attention(q, key, value, lambda score, b, h, q_idx, kv_idx: Scaled.apply(score))
        return torch.autograd.grad(out.sum(), q)[0]

    torch.testing.assert_close(d_query(3.0) * 2, d_query(6.0))
    assert traced == ["trace_value", "trace_joint"] * 2


def test_no_grad_in_a_mod_is_part_of_its_run(traced):
    for gradients in (True, False, True, False):
        before = len(traced)

        def mod(score, b, h, q_idx, kv_idx, gradients=gradients):
            with contextlib.nullcontext() if gradients else torch.no_grad():
                factor = torch.tanh(score)
            return score * factor

        def expected(score, b, h, q_idx, kv_idx, gradients=gradients):
            return score * (torch.tanh(score) if gradients else torch.tanh(score).detach())

        q = query.clone().requires_grad_()
        ours = torch.autograd.grad(flex_attention(q, key, value, mod).sum(), q)
        dense = torch.autograd.grad(reference(q, key, value, expected)[0].sum(), q)
        torch.testing.assert_close(ours, dense)
    assert len(traced) == before


def test_autocast_in_a_mod_is_part_of_its_run(traced):
    table = torch.randn(8, 8)

    def mod(score, b, h, q_idx, kv_idx, context=contextlib.nullcontext()):  # noqa: B008
        with context:
            return score + torch.mm(table, table)[0, 0] * kv_idx

    within = [
        functools.partial(mod, context=torch.autocast("cpu", dtype))
        for dtype in (torch.bfloat16, torch.float16)
    ]
    with torch.no_grad():
        expected = [reference(query, key, value, each)[0] for each in (mod, *within)]
        for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            for each, dense in zip((mod, *within), expected, strict=True):
                with around:
                    out = flex_attention(query, key, value, each)
                torch.testing.assert_close(out, dense, rtol=1e-9, atol=1e-9)
    assert traced == ["trace_value"] * 3


def test_a_shape_changed_in_place_was_another_before():
    """What is kept of a run is its tensors as they were in the end."""

    def flattened(score, b, h, q_idx, kv_idx, factor=None):
        own = score * 1
        shifted = own + (own.dim() if factor is None else factor) * kv_idx
        own.unsqueeze_(0)
        return shifted

    same_as_dense(functools.partial(flattened, factor=1))
    same_as_dense(flattened)


def test_a_mod_may_ask_whether_its_captures_have_gradients():
    table = draw(query.size(1))

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[h] if table.requires_grad else score - table[h] * kv_idx

    for wanted in ([], [table], []):
        table.requires_grad_(bool(wanted))
        same_as_dense(mod, None, wanted)


def test_the_backward_of_a_custom_operator_is_traced_each_time():
    scale = types.SimpleNamespace(backward=3.0)

    @torch.library.custom_op("test_replay::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_vmap(lambda info, in_dims, x: (doubled(x), in_dims[0]))
    doubled.register_autograd(lambda ctx, grad: grad * scale.backward)

    def d_query(factor):
        scale.backward = factor
        q = query.clone().requires_grad_()
        out = flex_attention(q, key, value, lambda score, b, h, q_idx, kv_idx: doubled(score))
        return torch.autograd.grad(out.sum(), q)[0]

    torch.testing.assert_close(d_query(3.0) * 2, d_query(6.0))


def test_a_mod_that_catches_everything(traced):
    """It also catches what ends a run that is not known: what it does then was never its own."""
    holder = types.SimpleNamespace(factor=2.0)

    def careless(score, b, h, q_idx, kv_idx):
        try:
            return score * holder.factor
        except:  # noqa: E722
            return score * kv_idx

    same_as_dense(lambda score, b, h, q_idx, kv_idx: score * kv_idx)
    for holder.factor in (2.0, 3.0):
        same_as_dense(careless)


def test_function_modes_around_a_call_reach_the_trace():
    class Twice(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.tanh else result

    with Twice():
        out = flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: torch.tanh(score))
    twice = reference(query, key, value, lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * 2)[0]
    torch.testing.assert_close(out, twice)


def test_errors_are_the_same_on_every_call():
    holder = types.SimpleNamespace(fails=False)

    def mod(score, b, h, q_idx, kv_idx):
        if holder.fails:
            raise KeyError("no such bias")
        return score

    flex_attention(query, key, value, mod)
    holder.fails = True
    for _ in range(2):
        with pytest.raises(KeyError, match="no such bias"):
            flex_attention(query, key, value, mod)

    def asks(score, b, h, q_idx, kv_idx):
        return score * 2 if not holder.fails else score * (2 if h == 0 else 3)

    holder.fails = False
    flex_attention(query, key, value, asks)
    holder.fails = True
    for _ in range(2):
        with pytest.raises(Exception, match="value"):
            flex_attention(query, key, value, asks)


def test_dtype_settings_and_devices_around_a_call(traced):
    def mod(score, b, h, q_idx, kv_idx):
        return score * (torch.ones(()) / 3)

    same_as_dense(mod)
    torch.set_default_dtype(torch.float64)
    try:
        same_as_dense(mod)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        same_as_dense(mod)
    before = len(traced)
    same_as_dense(mod)
    assert len(traced) == before


def test_captures_are_let_go():
    bias = parameter(query.size(1))
    same_as_dense(lambda score, b, h, q_idx, kv_idx, bias=bias: score + bias[h], None, [bias])
    gone = weakref.ref(bias)
    del bias
    gc.collect()
    assert gone() is None


def test_what_is_kept_is_bounded(monkeypatch):
    for name, limit, calls in (("_points", 100, 300), ("_ends", 3, 10)):
        monkeypatch.setattr(replay, name, Kept(limit))
        for factor in range(calls):
            flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: score * factor)  # noqa: B023
            assert 0 < len(getattr(replay, name)) <= limit


def test_threads():
    failures = []

    def work(seed):
        generator = random.Random(seed)
        try:
            for _ in range(30):
                factor = generator.choice([0.5, 0.25, 2.0])
                out = flex_attention(query, key, value, lambda score, b, h, q, kv: score * factor)  # noqa: B023
                dense = reference(query, key, value, lambda score, b, h, q, kv: score * factor)[0]  # noqa: B023
                torch.testing.assert_close(out, dense)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
