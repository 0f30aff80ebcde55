"""Combining masks and block masks."""

from __future__ import annotations

import itertools

import pytest
import torch
from mask_helpers import assert_same_block_mask, compare
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks.errors import MaskArgumentError
from flex_inductor.masks.library.algebra import and_masks, not_mask, offset, or_masks
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.masks.library.combine import intersect, unite
from flex_inductor.masks.runs import to_grid
from flex_inductor.masks.schedule import RunSchedule, runs_of_block_mask

IDS = torch.arange(600) // 130
BATCHED = torch.stack([torch.arange(600) // 90, torch.arange(600) // 333])


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


def per_batch(b, h, q, kv):
    return BATCHED[b, q] == BATCHED[b, kv]


def per_head(b, h, q, kv):
    return q - kv < 70 * (h + 1)


PAIRS = list(itertools.combinations((causal, documents, per_batch, per_head), 2))


def dense(mask_mod):
    return create_mask(mask_mod, 2, 3, 600, 500, "cpu")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(f.__name__ for f in p))
def test_functions(pair):
    a, b = map(dense, pair)
    assert torch.equal(dense(and_masks(*pair)), a & b)
    assert torch.equal(dense(or_masks(*pair)), a | b)
    assert torch.equal(dense(not_mask(pair[0])), ~a)
    for combined in (and_masks(*pair), or_masks(not_mask(pair[0]), pair[1])):
        compare(combined, 2, 3, 600, 500, 64)


def test_no_masks_at_all():
    assert dense(and_masks()).all() and not dense(or_masks()).any()


def test_and_of_nothing_batched_does_not_depend_on_batch():
    block_mask = create_block_mask(and_masks(causal, documents), 2, 3, 600, 500, "cpu", 64)
    assert block_mask.kv_indices.stride()[:2] == (0, 0)


def test_offset_is_a_window_of_the_whole_mask():
    whole = create_mask(causal, 1, 1, 600, 600, "cpu")
    assert torch.equal(
        create_mask(offset(causal, q=200, kv=30), 1, 1, 300, 500, "cpu"), whole[..., 200:500, 30:530]
    )
    compare(offset(documents, q=200, kv=30), None, None, 300, 500, 64)


def test_offset_for_each_batch():
    lengths = torch.tensor([100, 577])
    cached = create_mask(offset(causal, q=lengths), 2, 1, 16, 600, "cpu")
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(cached[b, 0], torch.arange(600) <= torch.arange(length, length + 16)[:, None])
    compare(offset(causal, q=lengths), 2, 3, 16, 600, 16)
    compare(offset(causal, q=torch.tensor(7)), 2, 3, 16, 600, 16)


def grid_of(blocks):
    runs, grids = runs_of_block_mask(blocks)
    grid = to_grid(runs)
    return grid.view(*grids, *blocks.kv_indices.shape[-2:]).expand(2, 3, -1, -1)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(f.__name__ for f in p))
@pytest.mark.parametrize("compact", [False, True])
def test_block_masks_combine_tile_by_tile(pair, compact):
    a, b = (create_block_mask(mod, 2, 3, 600, 500, "cpu", (64, 32), compact=compact) for mod in pair)
    both, either = intersect(a, b), unite(a, b)
    assert all(isinstance(made, RunSchedule if compact else BlockMask) for made in (both, either))
    torchs = [torch_create_block_mask(mod, 2, 3, 600, 500, "cpu", (64, 32)) for mod in pair]
    x, y = map(grid_of, torchs)
    both_lists, either_lists = (m.to_block_mask() if compact else m for m in (both, either))
    assert torch.equal(grid_of(both_lists), torch.minimum(x, y))
    assert torch.equal(grid_of(either_lists), torch.maximum(x, y))
    assert torch.equal(dense(both.mask_mod), dense(pair[0]) & dense(pair[1]))
    assert torch.equal(dense(either.mask_mod), dense(pair[0]) | dense(pair[1]))
    # the q side follows from the tiles
    assert_same_block_mask(RunSchedule.from_block_mask(both_lists).to_block_mask(), both_lists)


def test_combining_evaluates_nothing():
    def forbidden(b, h, q, kv):
        raise AssertionError("evaluated")

    a = create_block_mask(causal, 1, 1, 600, 500, "cpu")
    a.mask_mod = forbidden
    intersect(a, unite(a, a))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: create_block_mask(causal, 1, 1, 600, 499, "cpu"), r"lengths \(600, 500\) and \(600, 499\)"),
        (lambda: create_block_mask(causal, 1, 1, 600, 500, "cpu", 64), r"block \(128, 128\) and \(64, 64\)"),
        (lambda: create_block_mask(causal, 1, 4, 600, 500, "cpu"), "heads 1 and 4"),
        (lambda: causal, "second: expected a BlockMask or a RunSchedule, got function"),
    ],
    ids=["length", "block", "heads", "function"],
)
def test_sizes_that_do_not_match(other, message):
    with pytest.raises(MaskArgumentError, match=message):
        unite(create_block_mask(causal, 1, 1, 600, 500, "cpu"), other())


@pytest.mark.parametrize("function", [not_mask, offset])
def test_functions_want_functions(function):
    with pytest.raises(MaskArgumentError, match=r"expected a function .* use intersect or unite"):
        function(create_block_mask(causal, 1, 1, 64, 64, "cpu"))


def test_offset_wants_integers():
    with pytest.raises(MaskArgumentError, match=r"offset: q: .* got torch.float32 of shape \(2,\)"):
        offset(causal, q=torch.zeros(2))
