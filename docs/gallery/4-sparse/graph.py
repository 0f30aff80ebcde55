"""
Graph attention
===============

A node sees its neighbours. Nodes of one community have neighbouring numbers, so most tiles of the adjacency table are
empty. Graph transformers work this way.
"""

import show
import torch


def graph(nodes, communities, links):
    near = torch.arange(nodes) * communities // nodes
    generator = torch.Generator().manual_seed(0)
    chance = torch.where(near[:, None] == near, links * communities / nodes, 0.0)
    linked = torch.rand(nodes, nodes, generator=generator) < chance
    for first in range(communities):  # bridges between neighbouring communities
        linked[first * nodes // communities, (first + 1) % communities * nodes // communities] = True
    return linked | linked.T | torch.eye(nodes, dtype=torch.bool)


adjacency = graph(1024, 8, 5)


def neighbours(b, h, q_idx, kv_idx):
    return adjacency[q_idx, kv_idx]


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=neighbours,
    small={"adjacency": graph(48, 5, 3)},
    caption="Squares of scattered dots along the diagonal, one for each community, and few dots elsewhere.",
)
