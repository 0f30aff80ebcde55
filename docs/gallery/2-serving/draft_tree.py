"""
Speculative tree
================

A draft model proposes a tree of continuations, and the large model checks all of them in one pass. A node sees the
context, its ancestors and itself. Medusa, EAGLE and SpecInfer decode this way.
"""

import show
import torch

from flex_inductor import masks

context, nodes = 1984, 64
parents = [-1] + [(node - 1) // 2 for node in range(1, nodes)]  # two proposals after each node
sees = torch.eye(nodes, dtype=torch.bool)
for node in range(1, nodes):
    sees[node] |= sees[parents[node]]


def tree(b, h, q_idx, kv_idx):
    node = (kv_idx - context).clamp(min=0)
    return (kv_idx < context) | sees[q_idx, node]


# %%
# In the library: ``masks.tree(parents, context)``, where a tensor gives each batch its own context.

show.attention(
    mask=tree,
    library=masks.tree(parents, context),
    length=(nodes, context + nodes),
    heads=4,
    small={"context": 24, "length": (32, 56)},
    caption="All nodes see the context. To its right each sees only its ancestors and itself.",
)
