"""Windows and chunks in closed form against the analysis of the same mask."""

import itertools
import math

import pytest
import torch

from flex_inductor import create_block_mask
from flex_inductor.masks.window import Window, schedule_of

LENGTHS = ((1, 700), (300, 300), (513, 100), (128, 256), (5, 1))
WINDOWS = [
    Window(left, right, chunk)
    for left, right, chunk in itertools.product((math.inf, 5, 200), (math.inf, 0, 150), (0, 7, 200))
]


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_visits_what_the_analysis_finds(queries, keys):
    for window in WINDOWS:
        closed = schedule_of(window, queries, keys, torch.device("cpu"))
        mask_mod = window.mask_mod(keys - queries)
        analysed = create_block_mask(mask_mod, None, None, queries, keys, "cpu", compact=True)
        for side in ("kv", "full_kv", "q", "full_q"):
            found, expected = (grid_of(schedule, side) for schedule in (closed, analysed))
            wide = torch.zeros_like(found)
            wide[: expected.size(0), : expected.size(1)] = expected
            assert torch.equal(found, wide), (window, side)


def grid_of(schedule, side):
    """Which tiles each line visits."""
    offsets, runs = (getattr(schedule, f"{side}_{part}") for part in ("offsets", "runs"))
    others = schedule.kv_offsets if side.endswith("q") else schedule.q_offsets
    grid = torch.zeros(offsets.size(-1) - 1, others.size(-1) - 1, dtype=torch.int8)
    for line, (first, last) in enumerate(itertools.pairwise(offsets.flatten().tolist())):
        for start, stop in runs[first:last].tolist():
            grid[line, start:stop] += 1
    return grid
