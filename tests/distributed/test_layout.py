"""Layouts: which rank holds which tokens."""

import pickle

import pytest
import torch

from flex_inductor.distributed.layout import Layout


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
