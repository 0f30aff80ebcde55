"""Eager calls that run kernels: which do, what they give, and what is kept."""

import threading

import pytest
import torch

import flex_inductor
from flex_inductor import FlexError, create_block_mask, flex_attention, set_eager_kernels, upward
from flex_inductor.errors import FlexRuntimeError
from flex_inductor.lowerings import compiled
from flex_inductor.op.eager import kernels, known
from flex_inductor.reference import reference


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    kernels._computed.clear()
    monkeypatch.setattr(kernels, "LEAST", 0)
    flex_inductor.decisions(clear=True)
    yield
    set_eager_kernels("auto")


class Attention:
    """One class of calls: a learnt bias under a causal mask. The lengths may be any of several blocks."""

    def __init__(self, length=80, batch=2, transposed=False):
        generator = torch.Generator().manual_seed(length)
        shape = (batch, length, 2, 16) if transposed else (batch, 2, length, 16)
        draw = [torch.randn(shape, generator=generator) for _ in range(3)]
        self.inputs = [(t.transpose(1, 2) if transposed else t).requires_grad_() for t in draw]
        self.table = torch.randn(2, 400, generator=generator, requires_grad=True)
        self.mask = create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, length, length, "cpu", BLOCK_SIZE=32
        )

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + 99 * self.table.softmax(1)[h, q_idx - kv_idx + 150]

    def run(self, attend=flex_attention):
        out = attend(*self.inputs, self.score_mod, self.mask)
        out = out[0] if isinstance(out, tuple) else out
        return out, *torch.autograd.grad(out.sin().sum(), (*self.inputs, self.table))

    def check(self):
        for got, want in zip(self.run(), self.run(reference), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def chosen():
    return [d.chosen for d in flex_inductor.decisions(clear=True)]


def test_a_class_gets_its_kernel_once_it_has_computed_enough(monkeypatch):
    monkeypatch.setattr(kernels, "ENOUGH", 4 * (80**2 + 100**2 + 123**2))
    compiled._kernels.cache_clear()
    for length in (80, 100):
        Attention(length).check()
    assert chosen() == ["chunked", "chunked"]  # once for each direction
    Attention(123).check()
    assert chosen() == ["cpu", "cpu"]
    for length in (70, 80, 140):
        Attention(length).check()
    Attention(batch=3).check()
    assert not chosen()


def test_at_once_when_asked_in_any_layout_and_thread():
    set_eager_kernels("always")
    compiled._kernels.cache_clear()
    calls, failures = [Attention(80 + 7 * i) for i in range(4)], []

    def check(call):
        try:
            call.check()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=check, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert chosen() == ["cpu", "cpu"]
    Attention(transposed=True).check()
    assert chosen() == ["cpu", "cpu"]
    calls[0].check()
    assert not chosen()


def test_settings_of_torch_make_other_kernels():
    set_eager_kernels("always")
    compiled._kernels.cache_clear()
    Attention(85).check()
    assert chosen() == ["cpu", "cpu"]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        Attention(85).check()
    finally:
        torch.set_num_threads(before)
    assert chosen() == ["cpu", "cpu"]
    Attention(85).check()
    assert not chosen()


@pytest.mark.parametrize("why", ["never", "few scores"])
def test_calls_that_stay_in_chunks(why, monkeypatch):
    monkeypatch.setattr(upward, "compiled", lambda call: pytest.fail("compiled"))
    monkeypatch.setattr(kernels, "ENOUGH", 1)
    set_eager_kernels("never" if why == "never" else "auto")
    if why == "few scores":
        monkeypatch.setattr(kernels, "LEAST", 1 << 20)
    Attention().check()


def test_what_cannot_be_compiled_goes_on_in_chunks_or_says_so(monkeypatch, caplog):
    def fail(call, its_class):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(upward, "compiled", fail)
    monkeypatch.setattr(kernels, "ENOUGH", 1)
    Attention().check()
    Attention().check()
    text = "an eager call's kernel could not be made, it goes on in chunks: no compiler"
    assert [record.message for record in caplog.records] == [text, text]  # forward and backward
    set_eager_kernels("always")
    with pytest.raises(RuntimeError, match="no compiler"):
        Attention().run()


def test_a_layout_too_many_leaves_the_kernels_that_a_class_has(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "ENOUGH", 1)
    monkeypatch.setattr(compiled, "MOST_LAYOUTS", 1)
    ran, run = [], compiled._run
    monkeypatch.setattr(compiled, "_run", lambda *args: ran.append(True) or run(*args))
    query, lies_otherwise = torch.randn(1, 2, 24, 20), torch.randn(1, 2, 20, 24).mT
    for given, in_kernels in ((query, 1), (lies_otherwise, 1), (query + 1, 2)):
        known.forget()
        flex_attention(given, given, given)
        assert len(ran) == in_kernels
    assert "could not be made" not in caplog.text
    set_eager_kernels("always")
    with pytest.raises(FlexRuntimeError, match="1 kernels were compiled for calls that differ only in how"):
        flex_attention(lies_otherwise, lies_otherwise, lies_otherwise)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_live_index_out_of_range_is_the_same_error_however_a_call_runs(mode, monkeypatch, caplog):
    """And the call's class keeps its kernel: the mistake was the call's."""
    monkeypatch.setattr(kernels, "ENOUGH", 1)
    set_eager_kernels("never" if mode == "never" else "auto")
    shift, attention = torch.tensor(0), Attention()
    query, key, value = (tensor.detach() for tensor in attention.inputs)
    table = attention.table.detach()[0]

    def attend():
        return flex_attention(query, key, value, lambda score, b, h, q, kv: score + table[q + shift])

    for _ in ("first", "known"):  # by the op's checks, then as a call like an earlier one
        with pytest.raises(IndexError, match="out of bounds"):
            shift.fill_(table.size(0))
            attend()
        shift.fill_(0)
        attend()
    assert "could not be made" not in caplog.text and chosen() == ([] if mode == "never" else ["cpu"])


def test_bad_mode():
    with pytest.raises(
        FlexError, match="set_eager_kernels: mode: expected one of auto, always, never, got True"
    ):
        set_eager_kernels(True)
    assert set_eager_kernels("never") == "auto"
