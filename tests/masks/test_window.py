"""Windows and chunks in closed form against the analysis of the same mask."""

import itertools
import math

import pytest
import torch

from flex_inductor import RunSchedule, create_block_mask
from flex_inductor.masks import library, offset
from flex_inductor.masks.analysis.refine import tile_runs
from flex_inductor.masks.analysis.trace import trace_mask
from flex_inductor.masks.analysis.window import limits_of
from flex_inductor.masks.errors import MaskArgumentError, MaskModError
from flex_inductor.masks.runs import Extent
from flex_inductor.masks.window_schedule import WindowSchedule, schedule_of
from flex_inductor.mod_ir.arguments import MASK_LANES
from flex_inductor.mod_ir.split import split
from flex_inductor.mod_ir.trace import trace_value
from flex_inductor.visits.window import Window

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


def ids_of(*lengths):
    """Of three batches."""
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


DOCUMENTS = {
    "ascending": ids_of((30, 1, 60, 9), (100,), (50, 50)),
    "in any order, padded at the end": torch.tensor([5, 2, 9, -1])[
        ids_of((7, 80, 10, 3), (1, 1, 1, 97), (98, 2))
    ],
    "of one byte": ids_of((1, 99), (98, 2), (33, 33, 34)).to(torch.uint8) * 255,
    "for all batches": ids_of((30, 1, 60, 9))[0],
    "more than there are positions": ids_of((30, 71, 40), (100, 20, 21), (140, 1)),
}
BESIDE = {
    "alone": lambda same: same,
    "causal": lambda same: lambda b, h, q, kv: (q >= kv) & same(b, h, q, kv),
    "window": lambda same: lambda b, h, q, kv: same(b, h, q, kv) & (kv - 5 <= q) & (q - kv < 40),
    "chunks": lambda same: lambda b, h, q, kv: (q // 16 == kv // 16) & same(b, h, q, kv) & (q >= kv),
    "twice": lambda same: lambda b, h, q, kv: same(b, h, q, kv) & same(b, h, kv, q),
}
NOT_FOLLOWING = {
    "one goes on after another": torch.tensor([[0, 1, 0]] * 3).repeat_interleave(34, 1),
    "one of one batch does": torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 1]]).repeat_interleave(34, 1),
    "floats": torch.arange(100.0) // 30,
}


@pytest.mark.parametrize("beside", BESIDE)
def test_documents_that_follow_each_other(beside):
    """Their bounds are read off the ids, also where the function is known; others are analysed."""
    extent, cpu = Extent(3, 1, (70, 100), (16, 32)), torch.device("cpu")
    for name, ids in (DOCUMENTS | NOT_FOLLOWING).items():
        mask_mod = BESIDE[beside](document(ids))
        for queries, keys in ((70, 100), (100, 40), (1, 1)):
            made = create_block_mask(mask_mod, 3, None, queries, keys, "cpu", (16, 32), compact=True)
            if keys > 1:  # else there is one document
                assert isinstance(made, WindowSchedule) == (name in DOCUMENTS), name
            extent = Extent(3, 1, (queries, keys), (16, 32))
            runs = tile_runs(trace_mask(mask_mod, cpu), extent)
            analysed = RunSchedule.from_runs(runs, (3 if ids.dim() == 2 else 1, 1), extent, mask_mod)
            for ours, theirs in zip(made.tensors, analysed.tensors, strict=True):
                assert torch.equal(ours, theirs), (name, queries, keys)


def test_a_mask_of_documents_is_traced_once(monkeypatch):
    """What it captures may be other tensors on the next call."""
    ids = DOCUMENTS["ascending"]
    create_block_mask(document(ids), 3, None, 70, 100, "cpu", compact=True)
    monkeypatch.setattr("flex_inductor.masks.analysis.window.trace_mask", None)
    create_block_mask(document(ids.clone()), 3, None, 70, 100, "cpu", compact=True)


def document(ids):
    return lambda b, h, q, kv: ids[q] == ids[kv] if ids.dim() == 1 else ids[b, q] == ids[b, kv]


NOT_DOCUMENTS = {
    "of two tables": lambda x: lambda b, h, q, kv: x[b, q] == (x + 1)[b, kv],
    "of another batch": lambda x: lambda b, h, q, kv: x[0, q] == x[0, kv],
    "by head": lambda x: lambda b, h, q, kv: x[h, q] == x[h, kv],
    "moved": lambda x: lambda b, h, q, kv: x[b, q + 1] == x[b, kv],
    "with gaps": lambda x: lambda b, h, q, kv: (x[b, q] == x[b, kv]) & (q > kv),
    "moved by captures": lambda x: lambda b, h, q, kv: (x[b, q] == x[b, kv]) & (q + x[b, 0] >= kv),
    "or": lambda x: lambda b, h, q, kv: (x[b, q] == x[b, kv]) | (q >= kv),
    "two documents": lambda x: lambda b, h, q, kv: (x[b, q] == x[b, kv]) & (x[0][q] == x[0][kv]),
}


@pytest.mark.parametrize("case", NOT_DOCUMENTS)
def test_masks_like_documents(case):
    mask_mod, cpu = NOT_DOCUMENTS[case](DOCUMENTS["ascending"]), torch.device("cpu")
    made = create_block_mask(mask_mod, 3, 3, 70, 99, "cpu", (16, 32), compact=True)
    assert type(made) is RunSchedule
    extent, program = Extent(3, 3, (70, 99), (16, 32)), trace_mask(mask_mod, cpu)
    grids = tuple(3 if index in program.reads else 1 for index in "bh")
    analysed = RunSchedule.from_runs(tile_runs(program, extent), grids, extent, mask_mod)
    for ours, theirs in zip(made.tensors, analysed.tensors, strict=True):
        assert torch.equal(ours, theirs)


def test_too_few_ids():
    ids = DOCUMENTS["ascending"]
    for mask_mod, batch, length in (
        (document(ids), 3, 101),
        (document(ids), 4, 100),
        (document(ids[0]), 1, 101),
    ):
        with pytest.raises(MaskModError, match="needs an entry for every index"):
            create_block_mask(mask_mod, batch, None, length, length, "cpu", compact=True)


def test_captured_numbers_for_too_few_batches():
    mask_mod = library.prefix_lm(torch.tensor([3, 5]))
    with pytest.raises(MaskModError, match="fails at some b < 3"):
        create_block_mask(mask_mod, 3, None, 20, 20, "cpu")
    with pytest.raises(MaskArgumentError, match="reads b"):
        create_block_mask(mask_mod, None, None, 20, 20, "cpu")


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see(queries, keys):
    mask = create_block_mask(Window(right=0).mask_mod(), None, None, queries, keys, "cpu", compact=True)
    assert not any(getattr(mask, f"{side}_offsets").any() for side in ("kv", "full_kv", "q", "full_q"))


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
