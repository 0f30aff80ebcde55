"""What several mask tests share."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks.blockmask import create_block_mask

LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


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


def compare(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=128, **kwargs) -> BlockMask:
    """Ours, after comparing it with torch's."""
    arguments = (mask_mod, B, H, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE)
    ours = create_block_mask(*arguments, **kwargs)
    assert_same_block_mask(ours, torch_create_block_mask(*arguments, **kwargs))
    return ours
