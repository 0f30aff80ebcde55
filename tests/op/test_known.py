"""Eager calls like an earlier one: they go straight to its kernel, and only these do."""

import gc
import threading
import weakref

import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.autograd import forward_ad

from flex_inductor import FlexError, create_block_mask, flex_attention, set_eager_kernels
from flex_inductor.flash import flash_attn_func
from flex_inductor.kept import Kept
from flex_inductor.mod_ir import replay
from flex_inductor.op import dispatch
from flex_inductor.op.eager import known
from flex_inductor.reference import reference

pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture
def always():
    before = set_eager_kernels("always")
    yield
    set_eager_kernels(before)


@pytest.fixture
def prepared(monkeypatch):
    """The calls that are prepared anew."""
    calls, prepare = [], dispatch.prepare

    def counted(call):
        calls.append(call)
        return prepare(call)

    monkeypatch.setattr(dispatch, "prepare", counted)
    return calls


def inputs(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(3)]


def check(qkv, score_mod=None, mask=None, scale=None):
    found = flex_attention(*qkv, score_mod, mask, scale)
    right = reference(*qkv, score_mod, mask, scale)[0]
    torch.testing.assert_close(found, right.to(found.dtype), rtol=2e-4, atol=2e-5)


def times(number):
    return lambda score, b, h, q_idx, kv_idx: score * number + q_idx


def plus(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx]


def test_a_second_call_is_not_prepared(prepared):
    table = torch.randn(2, 200)
    for length in (40, 70, 70, 90):
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, "cpu", 32)
        check(inputs(1, 2, length, 16), plus(table), mask)
    assert len(prepared) == 1


def test_what_the_mod_does_counts_and_not_who_it_is(prepared):
    qkv = inputs(1, 2, 40, 16)
    for number in (0.5, 0.25, 0.5, 0.25):
        check(qkv, times(number))
    assert len(prepared) == 2

    class Mod:
        number = 0.5

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.number + q_idx

    mod = Mod()
    check(qkv, mod)
    mod.number = 3.0
    check(qkv, mod)
    check(qkv, mod, scale=0.1)
    assert len(prepared) == 4  # the first of these has been seen


def test_a_mod_that_does_not_do_the_same_again(prepared, monkeypatch):
    """Its kernel is of what it did when it was traced, not of what it did before."""
    # A mod that begins like one of another test would be run once more.
    monkeypatch.setattr(replay, "_points", Kept(9))
    qkv = inputs(1, 2, 40, 16)
    numbers = iter((0.5, 0.25))
    flex_attention(*qkv, lambda score, b, h, q_idx, kv_idx: score * next(numbers) + q_idx)
    for number in (0.5, 0.25):
        check(qkv, times(number))


@pytest.mark.parametrize(
    "other",
    [
        lambda qkv: [t.double() for t in qkv],
        lambda qkv: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv],
        lambda qkv: [qkv[0], *(t[:, :1] for t in qkv[1:])],
        lambda qkv: [qkv[0][:, :, :1], *qkv[1:]],
        lambda qkv: [qkv[0][:, :, :0], *qkv[1:]],
        lambda qkv: [qkv[0], *(t[:, :, :1] for t in qkv[1:])],
    ],
    ids=["dtype", "layout", "heads", "one query", "no query", "one key"],
)
def test_other_tensors_are_other_calls(other):
    qkv, table = inputs(1, 2, 40, 16), torch.randn(2, 200)
    check(qkv, plus(table))
    for _ in range(2):
        given = other(qkv)
        found = flex_attention(*given, plus(table), enable_gqa=True)
        right = reference(*given, plus(table))[0]
        torch.testing.assert_close(found, right.to(found.dtype), rtol=2e-4, atol=2e-5)


def test_other_captures_are_other_calls():
    qkv = inputs(1, 2, 40, 16)
    for table in (
        torch.randn(2, 200),
        torch.randn(2, 200).double(),
        torch.randn(200, 2).T,
        torch.randn(2, 1).expand(2, 200),
        torch.arange(400).view(2, 200),
    ):
        for _ in range(2):
            check(qkv, plus(table))


def test_threads_and_other_settings(prepared):
    qkv, failures = inputs(1, 2, 40, 16), []

    def run():
        try:
            check(qkv, times(0.5))
        except Exception as error:
            failures.append(error)

    run()
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(prepared) == 1
    torch.use_deterministic_algorithms(True)
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(prepared) == 2
    with fresh_cache():
        run()
    assert len(prepared) == 3
    assert not failures


def test_gradients_and_modes_take_the_long_way(prepared):
    qkv, table = inputs(1, 2, 40, 16), torch.randn(2, 200)
    for around in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with around():
            check(qkv, plus(table))
    assert len(prepared) == 1
    for _ in range(2):
        table = table.detach().requires_grad_()
        out = flex_attention(*qkv, plus(table))
        right = reference(*qkv, plus(table))[0]
        for one, other in zip(
            *(torch.autograd.grad(o.sin().sum(), table) for o in (out, right)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    with torch.no_grad():
        check(qkv, plus(table))
    with forward_ad.dual_level():
        out = flex_attention(forward_ad.make_dual(qkv[0], qkv[0]), *qkv[1:], plus(table))
        assert forward_ad.unpack_dual(out).tangent is not None
    out = torch.vmap(lambda q: flex_attention(q, *qkv[1:], plus(table.detach())))(torch.stack(qkv[:1] * 2))
    torch.testing.assert_close(out[1], flex_attention(*qkv, plus(table.detach())))


def test_refused_again():
    qkv, limit = inputs(1, 2, 40, 16), torch.tensor(20.0)

    def build():
        return create_block_mask(lambda b, h, q, kv: kv < limit, None, None, 40, 40, "cpu", 32)

    check(qkv, None, build())
    limit.requires_grad_()
    for _ in range(2):
        with pytest.raises(FlexError, match="limit"), torch.no_grad():
            flex_attention(*qkv, None, build())


def test_nothing_of_a_call_is_held():
    qkv, table = inputs(1, 2, 40, 16), torch.randn(2, 200)
    check(qkv, plus(table))
    gone = [weakref.ref(tensor) for tensor in (*qkv, table)]
    del qkv, table
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_graphs_that_are_made_for_each_call_are_not_held(monkeypatch):
    graphs, run = [], dispatch.kernels.run

    def seen(call, chunked):
        graphs.append(weakref.ref(call.score_mod))
        return run(call, chunked)

    monkeypatch.setattr(dispatch.kernels, "run", seen)
    query, key, value = inputs(1, 2, 40, 16)
    query.requires_grad_()
    for _ in range(2):
        flex_attention(query, key, value, lambda score, *_: Doubled.apply(score)).sum().backward()
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 4


def test_what_is_forgotten_meanwhile_stays_so(prepared, monkeypatch):
    before = dispatch.prepare

    def prepare(call):
        known.forget()
        return before(call)

    monkeypatch.setattr(dispatch, "prepare", prepare)
    for _ in range(2):
        check(inputs(1, 2, 40, 16))
    assert len(prepared) == 2


def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(known, "_runs", Kept(2))
    qkv = inputs(1, 2, 40, 16)
    for number in (0.5, 0.25, 3.0):
        flex_attention(*qkv, times(number))
    assert len(known._runs) == 2


def test_windows_of_growing_lengths(prepared):
    """Where they stand is data, so a decoding step is like the one before it."""
    key, value = (torch.randn(1, 60, 2, 16) for _ in range(2))
    query = torch.randn(1, 1, 2, 16)
    for length in range(40, 60):
        out = flash_attn_func(query, key[:, :length], value[:, :length], window_size=(7, 0))
        seen = [t[:, length - 8 : length].transpose(1, 2) for t in (key, value)]
        right = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), *seen)
        torch.testing.assert_close(out.transpose(1, 2), right)
    assert len(prepared) == 1
