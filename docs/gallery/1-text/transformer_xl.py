"""
Transformer-XL
==============

A segment sees itself causally, and a memory of the tokens before it. The bias depends on the distance alone, and is
learnt for each head. So there are more keys than queries.
"""

import show
import torch

memory, segment = 512, 512
by_distance = torch.randn(2, memory + segment, generator=torch.Generator().manual_seed(0)) * 0.5


def after_memory(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx + memory


def transformer_xl(score, b, h, q_idx, kv_idx):
    distance = (q_idx + memory - kv_idx).clamp(min=0)
    return score + by_distance[h, distance]


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=after_memory,
    score=transformer_xl,
    length=(segment, memory + segment),
    small={
        "memory": 24,
        "length": (24, 48),
        "by_distance": torch.randn(2, 48, generator=torch.Generator().manual_seed(1)).cumsum(1) * 0.1,
    },
    caption="A rectangle of memory, then a triangle. The bias is the same along each diagonal.",
)
