"""What several mask tests share."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks.analysis import refine, tables
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.masks.lists import LISTS


def assert_same_block_mask(ours: BlockMask, theirs: BlockMask) -> None:
    """Shapes, dtypes and every entry, the unused ones included: torch's own methods read them too."""
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.shape == theirs.shape
    for name in LISTS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), name
            assert torch.equal(a, b), name


@contextlib.contextmanager
def small_steps():
    """Limits so small that a short sequence goes through every level, strip and chunk of a long one."""
    with (
        mock.patch.multiple(
            refine, FIRST_RECTANGLES=4, RECTANGLES_AT_ONCE=64, POINTS_AT_ONCE=4096, POINTS_PER_LOOKUP=0
        ),
        mock.patch.object(tables, "POINTS_AT_ONCE", 200),
    ):
        yield


def compare(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=128, **kwargs) -> BlockMask:
    """Ours, after comparing it with torch's."""
    arguments = (B, H, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE)
    ours = create_block_mask(mask_mod, *arguments, **kwargs)
    assert_same_block_mask(ours, torch_create_block_mask(mask_mod, *arguments, **kwargs))
    return ours
