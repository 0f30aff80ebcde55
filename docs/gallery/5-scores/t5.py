"""
T5
==

Distances fall into buckets: near ones have a bucket each, far ones share buckets that grow logarithmically. The bias
of a bucket is learnt for each head.
"""

import math

import show
import torch

from flex_inductor import mods

farthest = 128
table = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))


def t5(score, b, h, q_idx, kv_idx):
    ahead = kv_idx - q_idx
    distance = ahead.abs()
    far = 8 + (torch.log(distance.clamp(min=1).float() / 8) / math.log(farthest / 8) * 8).to(torch.int64)
    bucket = torch.where(distance < 8, distance, far.clamp(max=15))
    return score + table[bucket + torch.where(ahead > 0, 16, 0), h]


# %%
# In the library: ``mods.t5_bias(table)``.

show.attention(
    score=t5,
    library=mods.t5_bias(table),
    at=((0, 0), (0, 1)),
    small={"farthest": 40},
    caption="Two heads: stripes along the diagonal, narrow near it and wider away from it.",
)
