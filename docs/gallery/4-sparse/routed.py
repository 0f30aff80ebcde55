"""
Routed blocks
=============

Each block of queries chooses the blocks of keys that it reads, for every head anew. MoBA and native sparse attention
choose by the scores of pooled blocks; here they are random numbers.
"""

import show
import torch

block, chosen = 64, 4


def choose(blocks):
    scores = torch.rand(2, blocks, blocks, generator=torch.Generator().manual_seed(0))
    places = torch.arange(blocks)
    scores = scores.masked_fill(places[:, None] < places, -1) + torch.eye(blocks)
    best = scores.topk(chosen, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


routes = choose(16)


def routed(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & routes[h, q_idx // block, kv_idx // block]


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=routed,
    block=64,
    at=((0, 0), (0, 1)),
    small={"block": 4, "routes": choose(12), "tile": 4},
    caption="Two heads: four blocks in each row, the diagonal one among them, otherwise in different places.",
)
