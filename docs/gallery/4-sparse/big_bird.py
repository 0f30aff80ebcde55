"""
BigBird
=======

Blocks near the diagonal, global blocks, and for each row of blocks a few random ones. A table says which; it is
captured like any other tensor.
"""

import show
import torch

block = 64


def table(rows):
    near = torch.arange(rows)[:, None] - torch.arange(rows)
    random = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)) < 3 / rows
    blocks = (near.abs() <= 1) | random
    blocks[0], blocks[:, 0] = True, True
    return blocks


blocks = table(32)


def big_bird(b, h, q_idx, kv_idx):
    return blocks[q_idx // block, kv_idx // block]


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=big_bird,
    length=2048,
    block=64,
    small={"block": 4, "blocks": table(14), "length": 56, "tile": 4},
    caption="Three blocks along the diagonal, a row and a column of global blocks, and some blocks anywhere.",
)
