"""
Soft gates
==========

Each head is an expert, and a router says how much it may take from each token: the logarithm of the gate is added to
the score. Soft mixtures of experts and gated caches work this way.
"""

import show
import torch

router = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0)) * 2
log_gate = torch.log_softmax(router, 0)


def soft_gates(score, b, h, q_idx, kv_idx):
    return score + log_gate[h, kv_idx]


# %%
# The library has no name for it: the function is enough.

show.attention(
    score=soft_gates,
    at=((0, 0), (0, 1)),
    caption="Two heads: a bias for each column. Where the first head is shut, the second is open.",
)
