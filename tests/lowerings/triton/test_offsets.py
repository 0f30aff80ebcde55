"""Offsets into schedules, and tiles, of more than 2**31 elements."""

import pytest

from flex_inductor.lowerings.triton.kernel import Tensor
from flex_inductor.lowerings.triton.kernel_builder import source
from flex_inductor.visits.text import Walk

addresses = source("addresses.jinja").module


@pytest.mark.parametrize("offsets", ["tl.int32", "tl.int64"])
def test_rows_of_lists(offsets):
    lists = Tensor("indices", ["1", "2", "60000", "60000"], ["size_0", "size_1", "60000", "1"], offsets)
    start = "indices + h.to(tl.int64) * size_1"
    assert addresses.listed(lists, "b", "h", "row") == f"{start} + row.to({offsets}) * 60000"
    assert addresses.listed(lists, "b", "h", "0") == start


@pytest.mark.parametrize("offsets, run", [("tl.int32", "run"), ("tl.int64", "tl.cast(run, tl.int64)")])
def test_runs(offsets, run):
    runs = Tensor("runs", ["size_0", "2"], ["2", "1"], offsets)
    walk = Walk("", False, "partial", "runs", runs, runs)
    ends = [addresses.run_end(walk, end) for end in (0, 1)]
    assert ends == [f"tl.load(runs + {run} * 2)", f"tl.load(runs + {run} * 2 + 1)"]


@pytest.mark.parametrize(
    "stride, text", [("1", "d"), ("70000000", "d.to(tl.int64)"), ("size_3", "d.to(tl.int64)")]
)
def test_columns_that_lie_apart(stride, text):
    """Stored like this too; interpreted_shapes.py loads them."""
    tensor = Tensor("out", ["1", "2", "64", "64"], ["0", "0", "1", stride], "tl.int64")
    assert addresses.columns(tensor, "d") == text
