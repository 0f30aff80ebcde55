"""
Relative positions in 2-D
=========================

A learnt bias for each offset down and right on an image. Swin, BEiT and SAM have it.
"""

import show
import torch

from flex_inductor import mods

height, width = 32, 32
bias = torch.randn(2, 2 * height - 1, 2 * width - 1, generator=torch.Generator().manual_seed(0))


def swin(score, b, h, q_idx, kv_idx):
    down = q_idx // width - kv_idx // width + height - 1
    right = q_idx % width - kv_idx % width + width - 1
    return score + bias[h, down, right]


# %%
# In the library: ``mods.relative_bias_2d(bias, width)``.

show.attention(
    score=swin,
    library=mods.relative_bias_2d(bias, width),
    length=height * width,
    small={"height": 7, "width": 7, "bias": bias[:, :13, :13], "length": 49},
    caption="A chequer of small squares, one for each pair of image rows, with the same bias along their diagonals.",
)
