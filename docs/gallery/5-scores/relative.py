"""
Relative positions
==================

A learnt number for each head and distance; farther distances share the last one. Shaw and others proposed it, Music
Transformer and many speech models have it.
"""

import show
import torch

from flex_inductor import mods

reach = 64
bias = torch.randn(2, 2 * reach + 1, generator=torch.Generator().manual_seed(0))


def relative(score, b, h, q_idx, kv_idx):
    return score + bias[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]


# %%
# In the library: ``mods.relative_bias(bias)``.

show.attention(
    score=relative,
    library=mods.relative_bias(bias),
    at=((0, 0), (0, 1)),
    small={"reach": 12, "bias": bias[:, :25]},
    caption="Two heads: each diagonal near the main one has a bias of its own, the corners have one each.",
)
