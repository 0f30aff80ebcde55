"""Generated Triton kernels that follow bounds, against the same kernels over runs. See test_interpreted.py."""

import math

import pytest
import torch
from marks import slow_but
from support import Sizes, attention_of, dense_of, judge, run

from flex_inductor import RunSchedule, create_block_mask, decisions, flex_attention
from flex_inductor.masks import prefix_lm
from flex_inductor.masks.runs import Extent
from flex_inductor.masks.schedule import TENSORS
from flex_inductor.masks.window_schedule import WindowSchedule, bounds_of
from flex_inductor.tools import interpret
from flex_inductor.visits import Bounds
from flex_inductor.visits.window import Window


def schedule_in(window, sizes, block, at_end=True, tensors=False):
    """Of a call with such lengths; with `tensors` its numbers are data."""
    extent = Extent(1, 1, (sizes.queries, sizes.keys), block)
    bounds = bounds_of(window, block, None if at_end else 0)
    if tensors:
        numbers = [n if not n else torch.tensor([n], dtype=torch.int32) for n in bounds[2:]]
        bounds = Bounds(*block, *numbers)
    shift = sizes.keys - sizes.queries if at_end else 0
    return WindowSchedule(bounds, extent, torch.device("cpu"), window.mask_mod(shift))


def as_runs(schedule):
    tensors = {name: getattr(schedule, name) for name in TENSORS}
    names = ("batch", "heads", "seq_lengths", "BLOCK_SIZE", "mask_mod", "separate_full_blocks")
    return RunSchedule(**tensors, **{name: getattr(schedule, name) for name in names})


CASES = {
    "more queries than keys": (Window(right=0), Sizes(1, 2, 1, 100, 70), (32, 16), {}),
    "window": (Window(20, 9), Sizes(1, 2, 1, 70, 100), (16, 16), {"at_end": False, "tensors": True}),
    "chunks": (Window(math.inf, 0, 20), Sizes(1, 2, 1, 90, 100), (16, 32), {}),
    "no number is fixed": (
        Window(right=0),
        Sizes(2, 2, 1, 40, 20),
        (16, 16),
        {"at_end": False, "dynamic": True},
    ),
    "few queries": (Window(60, 0), Sizes(1, 2, 1, 3, 300), (32, 32), {}),
    "few queries without begin": (Window(right=0), Sizes(2, 2, 1, 3, 300), (32, 32), {}),
}


@pytest.mark.parametrize("case", slow_but(CASES, "no number is fixed", "few queries"))
def test_bounds_give_what_runs_give(case, kinds):
    window, sizes, block, given = CASES[case]
    more = dict(given)
    attend = interpret.compiled(attention_of(None), dynamic=more.pop("dynamic", False))
    schedule = schedule_in(window, sizes, block, **more)
    decisions(clear=True)
    inputs = sizes.inputs(torch.float32)
    found = judge(attend, dense_of(None), inputs, (), schedule).named()
    assert [(d.chosen, d.call.endswith(" in bounds")) for d in decisions(clear=True)] == [
        ("triton", True)
    ] * 2
    assert ("decode" in kinds) == case.startswith("few queries")
    for name, expected in run(attend, inputs, (), as_runs(schedule)).named().items():
        assert torch.equal(found[name], expected), name
    assert [d.call.endswith(" in runs") for d in decisions()] == [True] * 2


@pytest.mark.parametrize("queries", slow_but([3, 90], 3))
def test_documents_by_batch(queries, kinds):
    """Others do not compile again."""
    attend, sizes = interpret.compiled(attention_of(None), dynamic=False), Sizes(2, 2, 1, queries, 90)
    counts = []
    for lengths in (([90], [1, 30, 59]), ([2, 44, 44], [33, 33, 24])):
        ids = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
        mask_mod = lambda b, h, q, kv, ids=ids: (ids[b, q] == ids[b, kv]) & (q >= kv)  # noqa: E731
        schedule = create_block_mask(mask_mod, 2, None, queries, 90, "cpu", 16, compact=True)
        decisions(clear=True)
        judge(attend, dense_of(None), sizes.inputs(torch.float32), (), schedule)
        counts.append([(d.chosen, d.call.endswith(" in bounds")) for d in decisions()])
    assert counts == [[("triton", True)] * 2, []]
    assert ("decode" in kinds) == (queries == 3)


def test_numbers_by_batch():
    """Which are captured: others do not compile again."""
    attend, sizes = interpret.compiled(attention_of(None), dynamic=False), Sizes(2, 2, 1, 60, 70)
    counts = []
    for entries in ([9, 50], [40, 0]):
        mask = prefix_lm(torch.tensor(entries))
        schedule = create_block_mask(mask, 2, None, 60, 70, "cpu", 16, compact=True)
        decisions(clear=True)
        judge(attend, dense_of(None), sizes.inputs(torch.float32), (), schedule)
        counts.append([(d.chosen, d.call.endswith(" in bounds")) for d in decisions()])
    assert counts == [[("triton", True)] * 2, []]


def test_other_lengths_do_not_compile_again():
    attend = interpret.compiled(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask))
    counts = []
    decisions(clear=True)
    for queries, keys in ((100, 90), (70, 120), (50, 130), (33, 64)):
        mask = schedule_in(Window(40, 0), Sizes(1, 2, 2, queries, keys), (16, 32))
        q, k = (torch.randn(1, 2, length, 16) for length in (queries, keys))
        torch.testing.assert_close(attend(q, k, k, mask), flex_attention(q, k, k, block_mask=mask))
        counts.append(len(decisions()))
    assert counts[-1] == counts[1] and {d.chosen for d in decisions()} == {"triton"}
