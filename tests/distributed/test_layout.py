"""Layouts: which rank holds which tokens."""

import pickle

import pytest
import torch

from flex_inductor import RunSchedule, create_block_mask, masks
from flex_inductor.distributed.layout import Layout
from flex_inductor.distributed.methods import Groups, plan_mask
from flex_inductor.op import Inputs
from tests.tile_maps import assert_runs_are_pieces


def test_every_token_is_on_one_rank():
    layout = Layout(100, 16, 3, (2, 0, 0, 2, 0, 2, 0))
    assert layout.lengths == (52, 0, 48)
    held = [layout.positions(rank) for rank in range(3)]
    assert [h.numel() for h in held] == [52, 0, 48]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(100, dtype=torch.int32))
    assert all(torch.equal(h, h.sort().values) for h in held)
    assert held[0][-4:].tolist() == [96, 97, 98, 99]  # the short tile is last


def test_a_digest_tells_layouts_apart():
    one, other = Layout(64, 16, 2, (0, 0, 1, 1)), Layout(64, 16, 2, (0, 1, 1, 0))
    assert one.digest() != other.digest()
    assert pickle.loads(pickle.dumps(one)).digest() == one.digest()


def test_owners_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="for each of 4 tiles, got 3 entries from 0 to 1"):
        Layout(64, 16, 2, (0, 1, 0))
    with pytest.raises(ValueError, match="a rank from 0 to 1"):
        Layout(64, 16, 2, (0, 1, 0, 2))


@pytest.mark.parametrize("method", ["cast", "all_gather"])
@pytest.mark.parametrize(
    "mask_mod", [masks.causal(), masks.sliding_window(40), masks.document(lengths=[70, 130, 100])]
)
def test_runs_of_a_plan_are_pieces(method, mask_mod):
    """The last tile is short, tiles of a rank lie apart, and keys come in the order of their ranks."""
    layout = Layout(300, 32, 3, (2, 0, 0, 2, 1, 0, 0, 1, 0, 1))
    whole = RunSchedule.from_block_mask(create_block_mask(mask_mod, None, None, 300, 300, "cpu", 16))
    for rank in range(3):
        made = plan_mask(method, whole, layout, rank, Groups(""))
        assert_runs_are_pieces(Inputs(schedule=made.part.schedule, tile_map=made.part.tile_map))
