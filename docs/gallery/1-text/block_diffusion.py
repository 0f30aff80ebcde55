"""
Block diffusion
===============

The sequence is there twice: noised tokens, then the same tokens clean. A noised block sees itself and the clean blocks
before it, so that one pass trains all blocks. BD3-LM and its successors train with it.
"""

import show
import torch

from flex_inductor import masks

tokens, block = 512, 64


def block_diffusion(b, h, q_idx, kv_idx):
    q_block, kv_block = q_idx % tokens // block, kv_idx % tokens // block
    q_noised, kv_noised = q_idx < tokens, kv_idx < tokens
    own = q_noised & kv_noised & (q_block == kv_block)
    past = ~kv_noised & torch.where(q_noised, kv_block < q_block, kv_block <= q_block)
    return own | past


# %%
# In the library: ``masks.block_diffusion(tokens, block)``.

show.attention(
    mask=block_diffusion,
    library=masks.block_diffusion(tokens, block),
    length=2 * tokens,
    small={"tokens": 24, "block": 4, "tile": 4},
    caption="Small squares along the upper half of the diagonal, and two staircases of clean keys at the right.",
)
