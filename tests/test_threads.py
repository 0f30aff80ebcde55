"""Any function may be called from any thread, while others trace, compile and differentiate."""

import sys
import threading

import pytest
import torch
from mask_helpers import assert_same_block_mask
from op.calls import close, leaf
from support import Cube
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor import create_block_mask, flex_attention, masks
from flex_inductor.reference import reference

LENGTH = 24


def in_a_thread(work):
    """What `work()` gives in a thread of its own; its errors are raised here."""
    results, errors = [], []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "still running after a minute"
    if errors:
        raise errors[0]
    return results[0]


cubed = Cube.apply


def shifted(table, cube):
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + LENGTH]


def cubed_capture(table, cube):
    return lambda score, b, h, q_idx, kv_idx: score * table[h] + cube(table)[kv_idx]


def cubed_score(table, cube):
    return lambda score, b, h, q_idx, kv_idx: cube(score) + torch.tanh(table[q_idx]) * table[kv_idx]


class Attention:
    """One call and its gradients, with what must come of them."""

    def __init__(self, build, seed):
        self.build = build
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, 2, LENGTH, 8)] * 3 + [(2 * LENGTH,)]
        self.inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        self.expected = self.results(lambda q, k, v, mod: reference(q, k, v, mod)[0], lambda x: x**3)

    def results(self, attend, cube=cubed):
        leaves = [leaf(tensor) for tensor in self.inputs]
        out = attend(*leaves[:3], self.build(leaves[3], cube))
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    def trained(self, attend=flex_attention):
        close(self.results(attend), self.expected)

    def served(self):
        with torch.inference_mode():
            close(flex_attention(*self.inputs[:3], self.build(self.inputs[3], cubed)), self.expected[0])


class Mask:
    """A mask, with the lists that torch makes of it."""

    def __init__(self, mask_mod):
        self.arguments = (mask_mod, None, None, 256, 256, "cpu", 32)
        self.expected = torch_create_block_mask(*self.arguments)

    def made(self):
        assert_same_block_mask(create_block_mask(*self.arguments), self.expected)

    def made_compact(self):
        schedule = create_block_mask(*self.arguments, compact=True)
        assert_same_block_mask(schedule.to_block_mask(), self.expected)


def visible_everywhere():
    """What torch keeps once for the whole process and tracers are known to change."""
    return (
        getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", None),  # each thread's own from 2.14 on
        torch.fx._symbolic_trace.CURRENT_PATCHER,
        torch.fx.traceback.has_preserved_node_meta(),
        torch.nn.Module.__call__,
        torch.nn.Module.__getattr__,
        torch.autograd.Function.apply.__func__,
        torch.is_anomaly_enabled(),
    )


def test_a_trace_changes_nothing_that_other_threads_see():
    before, seen = visible_everywhere(), []
    attention = Attention(shifted, 0)

    def watching(build):
        def mod(*lanes):
            seen.append(visible_everywhere())
            return build(*lanes)

        return mod

    attention.results(lambda q, k, v, mod: flex_attention(q, k, v, watching(mod)))
    create_block_mask(watching(masks.causal()), None, None, 64, 64, "cpu")
    assert len(seen) >= 3
    assert all(state == before for state in seen)


def test_compiled_code_runs_while_another_thread_traces():
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    x = torch.ones(3)
    expected = x.sin()
    compiled(x)

    def during(value):
        in_a_thread(lambda: torch.testing.assert_close(compiled(x), expected))
        return value

    flex_attention(*torch.ones(3, 1, 1, 4, 4), lambda score, *_: during(score))
    create_block_mask(lambda b, h, q_idx, kv_idx: during(q_idx >= kv_idx), None, None, 64, 64, "cpu")


def test_another_thread_compiles_meanwhile():
    """torch says of the whole process that it compiles; only the thread that does may go by it."""
    mask, attention, served = Mask(masks.sliding_window(20)), Attention(cubed_capture, 1), []

    def backend(module, _inputs):
        for work in (mask.made, mask.made_compact, attention.trained):
            in_a_thread(work)
            served.append(work)
        return module

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(served) == 3


@pytest.mark.parametrize(
    "compiling",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12",
                reason="compiled code of torch 2.11 raises while another thread compiles",
            ),
        ),
    ],
)
def test_all_at_once(compiling):
    ids = torch.arange(256) // 20
    calls = [Attention(build, seed) for seed, build in enumerate((shifted, cubed_capture, cubed_score))]
    made = [Mask(masks.document(ids)), Mask(lambda b, h, q, kv: (q - kv).abs() < 33)]
    compiled = torch.compile(lambda q, k, v, mod: flex_attention(q, k, v, mod), backend="eager")
    calls[0].trained(compiled)

    def compiles():
        def function(ids):
            mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 256, 256, "cpu", 32)
            return mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()

        in_one_document = torch.compile(function, backend="aot_eager", fullgraph=True)(ids * 0)
        assert in_one_document == 64

    rounds = [
        (calls[0].trained, 4),
        (calls[1].trained, 4),
        (calls[2].trained, 4),
        (calls[1].served, 8),
        (made[0].made, 6),
        (made[1].made_compact, 6),
        (lambda: calls[0].trained(compiled), 8),
        *[(compiles, 2)] * compiling,
    ]
    start = threading.Barrier(len(rounds))
    failures = []

    def repeat(work, times):
        start.wait()
        for _ in range(times):
            try:
                work()
            except BaseException as error:
                failures.append(error)

    before = visible_everywhere()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=repeat, args=each, daemon=True) for each in rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads), "still running after two minutes"
    if failures:
        raise failures[0]
    assert visible_everywhere() == before
    compiles()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_call_may_move_between_threads(direction):
    """As autograd does, whose threads of its own run a backward on a device."""
    attention = Attention(cubed_capture, 2)

    def split(q, k, v, mod):
        return (
            flex_attention(q, k, v, mod)
            if direction == "backward"
            else in_a_thread(lambda: flex_attention(q, k, v, mod))
        )

    leaves = [leaf(tensor) for tensor in attention.inputs]
    out = split(*leaves[:3], attention.build(leaves[3], cubed))
    backward = lambda: torch.autograd.grad(out.sin().sum(), leaves)  # noqa: E731
    grads = in_a_thread(backward) if direction == "backward" else backward()
    close((out.detach(), *grads), attention.expected)
