"""Windows and chunks in closed form against the analysis of the same mask."""

import itertools
import math

import pytest
import torch

from flex_inductor import RunSchedule, create_block_mask
from flex_inductor.masks import library, offset
from flex_inductor.masks.errors import MaskArgumentError, MaskModError
from flex_inductor.masks.refine import tile_runs
from flex_inductor.masks.tables import Extent
from flex_inductor.masks.trace import trace_mask
from flex_inductor.masks.window import limits_of
from flex_inductor.masks.window_schedule import WindowSchedule, schedule_of
from flex_inductor.mod_ir.arguments import MASK_LANES
from flex_inductor.mod_ir.split import split
from flex_inductor.mod_ir.trace import trace_value
from flex_inductor.windows import Window

GAPS = [Window(3, -5), Window(math.inf, -150, 200), Window(-3, math.inf, 7)]
LENGTHS = ((1, 700), (300, 300), (513, 100), (128, 256), (5, 1))
WINDOWS = [
    Window(left, right, chunk)
    for left, right, chunk in itertools.product((math.inf, 5, 200), (math.inf, 0, 150), (0, 7, 200))
]
WINDOWS += [Window(right=0, prefix=150), Window(right=-5, prefix=128), Window(right=150, prefix=3)]
WINDOWS += [Window(-3, math.inf), Window(200, -5), Window(math.inf, -1), Window(-5, 130)]


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_visits_what_the_analysis_finds(queries, keys):
    extent, cpu = Extent(1, 1, (queries, keys), (128, 128)), torch.device("cpu")
    for window in (*WINDOWS, *GAPS):
        for shift in (keys - queries, 0):
            mask_mod = window.mask_mod(shift)
            runs = tile_runs(trace_mask(mask_mod, cpu), extent)
            analysed = RunSchedule.from_runs(runs, (1, 1), extent, mask_mod)
            made = create_block_mask(mask_mod, None, None, queries, keys, "cpu", compact=True)
            for ours, theirs in zip(made.tensors, analysed.tensors, strict=True):
                assert torch.equal(ours, theirs), (window, shift)
            if shift or queries == keys:
                closed = schedule_of(window, queries, keys, cpu)
                _visit_the_same(closed, analysed, or_more=window in GAPS)


def _visit_the_same(closed, analysed, or_more):
    for side in ("kv", "full_kv", "q", "full_q"):
        found, expected = (grid_of(schedule, side) for schedule in (closed, analysed))
        wide = torch.zeros_like(found)
        wide[: expected.size(0), : expected.size(1)] = expected
        assert torch.equal(found, wide) or (or_more and (found >= wide).all()), (closed, side)


ENTRIES = [
    torch.tensor(entries) for entries in ([3, 40, 0], [200, -9, 70])
]  # of three batches, now and later
BY_CAPTURES = {
    "prefix": lambda x: library.prefix_lm(x),
    "one prefix": lambda x: prefix_of(x[1]),
    "a prefix, one less": lambda x: lambda b, h, q, kv: (kv <= x[b] - 2) | (kv <= q + 3),
    "moved": lambda x: offset(library.causal(), q=x),
    "all moved": lambda x: offset(library.causal(), q=x[1].int()),
    "window, moved": lambda x: offset(library.sliding_window(9), q=x),
    "within a distance": lambda x: lambda b, h, q, kv: (q - kv <= x[b]) & True,
}


def prefix_of(size):
    return lambda b, h, q, kv: (q >= kv) | (size > kv)


NOT_BY_CAPTURES = {
    "two tables": lambda x: lambda b, h, q, kv: (q + x[b] >= kv) & (q - x[1] <= kv),
    "twice": lambda x: lambda b, h, q, kv: q + x[b] + x[b] >= kv,
    "chunks": lambda x: lambda b, h, q, kv: (q + x[b] >= kv) & (q // 16 == kv // 16),
    "floats": lambda x: lambda b, h, q, kv: q + x.double()[b] >= kv,
    "by head": lambda x: lambda b, h, q, kv: q + x[h] >= kv,
    "prefix of a window": lambda x: lambda b, h, q, kv: ((q >= kv) & (q - kv < 9)) | (kv < x[b]),
}


@pytest.mark.parametrize("case", [*BY_CAPTURES, *NOT_BY_CAPTURES])
def test_windows_by_captured_numbers(case):
    """Their values are read anew, also where the function is known."""
    extent, cpu = Extent(3, 3, (70, 100), (16, 32)), torch.device("cpu")
    for entries in ENTRIES:
        mask_mod = (BY_CAPTURES | NOT_BY_CAPTURES)[case](entries)
        made = create_block_mask(mask_mod, 3, 3, 70, 100, "cpu", (16, 32), compact=True)
        assert isinstance(made, WindowSchedule) == (case in BY_CAPTURES)
        program = trace_mask(mask_mod, cpu)
        grids = tuple(3 if index in program.reads else 1 for index in "bh")
        analysed = RunSchedule.from_runs(tile_runs(program, extent), grids, extent, mask_mod)
        for ours, theirs in zip(made.tensors, analysed.tensors, strict=True):
            assert torch.equal(ours, theirs)


def test_captured_numbers_for_too_few_batches():
    mask_mod = library.prefix_lm(torch.tensor([3, 5]))
    with pytest.raises(MaskModError, match="fails at some b < 3"):
        create_block_mask(mask_mod, 3, None, 20, 20, "cpu")
    with pytest.raises(MaskArgumentError, match="reads b"):
        create_block_mask(mask_mod, None, None, 20, 20, "cpu")


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see(queries, keys):
    mask = create_block_mask(Window(right=0).mask_mod(), None, None, queries, keys, "cpu", compact=True)
    assert not any(getattr(mask, f"{side}_runs").numel() for side in ("kv", "full_kv", "q", "full_q"))


LIMITS = {
    "causal": (lambda b, h, q, kv: q >= kv, Window(right=0)),
    "beside others": (
        lambda b, h, q, kv: (q % 3 == 1) & (q - kv <= 9) & (q // 4 == kv // 4),
        Window(9, chunk=4),
    ),
    "both ends": (lambda b, h, q, kv: ((q - kv).abs() < 5) & (kv < 3), Window(4, 4)),
    "or": (lambda b, h, q, kv: (q >= kv) | (kv < 3), Window()),
    "a captured number": (lambda b, h, q, kv: q + torch.ones(2, dtype=torch.int64)[b] >= kv, Window()),
    "floats": (lambda b, h, q, kv: q * 1.0 >= kv, Window()),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(case):
    mask_mod, expected = LIMITS[case]
    graph = trace_value(mask_mod, MASK_LANES, torch.zeros(()), ())
    assert limits_of(split(graph, MASK_LANES).lane.graph) == expected


def grid_of(schedule, side):
    """Which tiles each line visits."""
    offsets, runs = (getattr(schedule, f"{side}_{part}") for part in ("offsets", "runs"))
    others = schedule.kv_offsets if side.endswith("q") else schedule.q_offsets
    grid = torch.zeros(offsets.size(-1) - 1, others.size(-1) - 1, dtype=torch.int8)
    for line, (first, last) in enumerate(itertools.pairwise(offsets.flatten().tolist())):
        for start, stop in runs[first:last].tolist():
            grid[line, start:stop] += 1
    return grid
