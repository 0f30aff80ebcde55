"""
Toeplitz bias
=============

A number for every possible distance in each direction, here a wave that fades. The table is as long as the sequence is,
not its square.
"""

import show
import torch

tokens = 1024


def wave(length):
    distance = torch.arange(1 - length, length)
    periods = torch.tensor([[6.0], [17.0]]) * length / 64
    return 3 * torch.cos(distance * 6.2832 / periods) * torch.exp(-distance.abs() * 2.5 / length)


bias = wave(tokens)


def toeplitz(score, b, h, q_idx, kv_idx):
    return score + bias[h, q_idx - kv_idx + tokens - 1]


# %%
# The library has no name for it: the function is enough.

show.attention(
    score=toeplitz,
    length=tokens,
    at=((0, 0), (0, 1)),
    small={"tokens": 48, "bias": wave(48)},
    caption="Two heads: waves along the diagonals, shorter in the first head, which fade towards the corners.",
)
