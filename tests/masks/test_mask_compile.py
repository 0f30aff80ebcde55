"""create_block_mask inside compiled functions."""

from __future__ import annotations

import pytest
import torch
from mask_helpers import assert_same_block_mask
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks import library
from flex_inductor.masks.errors import MaskArgumentError
from flex_inductor.masks.library.algebra import and_masks
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.masks.lists import LISTS


def lists_of(block_mask):
    return tuple(getattr(block_mask, name) for name in LISTS)


def documents(ids):
    return lambda b, h, q, kv: ids[q] == ids[kv]


def documents_of_batch(ids):
    return lambda b, h, q, kv: ids[b, q] == ids[b, kv]


def between(starts, ends, shift):
    return lambda b, h, q, kv: (kv >= starts[q]) & (kv < ends[q]) & (q - kv != shift)


def within(width):
    return lambda b, h, q, kv: q - kv < width


class Counter:
    """A backend that runs the graph as it is and counts how often it was asked."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_fullgraph_with_new_documents_each_step(backend):
    @torch.compile(backend=backend, fullgraph=True)
    def build(ids):
        mask_mod = and_masks(library.causal(), lambda b, h, q, kv: ids[b, q] == ids[b, kv])
        return lists_of(create_block_mask(mask_mod, 2, 3, 500, 500, "cpu", 64)), ids.sum()

    for width in (100, 77, 300):
        ids = torch.stack([torch.arange(500) // width, torch.arange(500) // 50])
        got, total = build(ids)
        mask_mod = and_masks(library.causal(), documents_of_batch(ids))
        expected = torch_create_block_mask(mask_mod, 2, 3, 500, 500, "cpu", 64)
        assert total == ids.sum()
        for a, b in zip(got, lists_of(expected), strict=True):
            assert a.shape == b.shape and torch.equal(a, b)


def test_new_values_of_a_capture_do_not_recompile():
    counter = Counter()

    @torch.compile(backend=counter, fullgraph=True)
    def build(ids):
        return create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 500, 500, "cpu", 64)

    for width in (100, 77, 300):
        ids = torch.arange(500) // width
        expected = torch_create_block_mask(documents(ids), None, None, 500, 500, "cpu", 64)
        assert_same_block_mask(build(ids), expected)
    assert len(counter.graphs) == 1


def test_numbers_in_closures_stay_apart():
    counter = Counter()

    @torch.compile(backend=counter, fullgraph=True)
    def build(width):
        return create_block_mask(lambda b, h, q, kv: q - kv < width, None, None, 500, 500, "cpu", 64)

    for width in (100, 77, -300, 12):
        expected = torch_create_block_mask(within(width), None, None, 500, 500, "cpu", 64)
        assert_same_block_mask(build(width), expected)
    assert len(counter.graphs) <= 2


def nearer(slope, shift):
    return lambda b, h, q, kv: ((q - kv).abs() * slope < 50.5) & (q - kv != shift)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_floats_in_closures_keep_their_value(backend):
    @torch.compile(backend=backend, fullgraph=True)
    def build(slope, shift):
        mask_mod = nearer(slope, shift)
        return create_block_mask(mask_mod, None, None, 500, 500, "cpu", 64)

    counters.clear()
    for slope, shift in ((0.3, 1), (1 / 3, 2), (0.505, 3), (0.1, 4)):  # 0.505 decides by rounding at 100
        expected = torch_create_block_mask(nearer(slope, shift), None, None, 500, 500, "cpu", 64)
        assert_same_block_mask(build(slope, shift), expected)
    assert counters["stats"]["unique_graphs"] <= 2


def test_several_captures_keep_their_places():
    starts = torch.arange(500) // 90 * 90
    ends = starts + 130

    @torch.compile(backend="eager", fullgraph=True)
    def build(ends, starts, shift):
        def mask_mod(b, h, q, kv):
            return (kv >= starts[q]) & (kv < ends[q]) & (q - kv != shift)

        return create_block_mask(mask_mod, None, None, 500, 500, "cpu", 64)

    for shift in (3, 4, 5):
        expected = torch_create_block_mask(between(starts, ends, shift), None, None, 500, 500, "cpu", 64)
        assert_same_block_mask(build(ends, starts, shift), expected)


def test_without_full_blocks():
    @torch.compile(backend="eager", fullgraph=True)
    def build():
        return create_block_mask(
            lambda b, h, q, kv: q >= kv, 1, 1, 300, 300, "cpu", 64, separate_full_blocks=False
        )

    eager = create_block_mask(library.causal(), 1, 1, 300, 300, "cpu", 64, separate_full_blocks=False)
    assert_same_block_mask(build(), eager)


def test_compact_breaks_the_graph_and_works():
    counter = Counter()

    @torch.compile(backend=counter)
    def build(ids):
        schedule = create_block_mask(
            lambda b, h, q, kv: ids[q] == ids[kv], None, None, 500, 500, "cpu", 64, compact=True
        )
        return schedule, ids.sum()

    ids = torch.arange(500) // 77
    direct = create_block_mask(
        lambda b, h, q, kv: ids[q] == ids[kv], None, None, 500, 500, "cpu", 64, compact=True
    )
    schedule, total = build(ids)
    assert torch.equal(schedule.kv_runs, direct.kv_runs) and total == ids.sum()
    assert len(counter.graphs) == 1  # of the sum: nothing inside of create_block_mask is compiled


@pytest.mark.parametrize("separate_full_blocks", [True, False])
def test_fake_tensors_give_a_block_mask_of_the_right_shapes(separate_full_blocks):
    def build(ids):
        return create_block_mask(
            documents_of_batch(ids), 2, 3, 500, 300, "cpu", 64, separate_full_blocks=separate_full_blocks
        )

    ids = torch.arange(1000).view(2, 500) // 77
    with FakeTensorMode() as mode:
        fake = build(mode.from_tensor(ids))
    for got, expected in zip(lists_of(fake), lists_of(build(ids)), strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


def test_fake_tensors_have_no_runs():
    with FakeTensorMode(), pytest.raises(MaskArgumentError, match="compact: got True under FakeTensorMode"):
        create_block_mask(library.causal(), None, None, 500, 500, "cpu", 64, compact=True)
