"""
Distance decay
==============

Weights fade by a factor with every step back, as in RetNet: an added multiple of the distance, since the softmax makes
factors of sums.
"""

import show
import torch

from flex_inductor import masks, mods

log_decay = torch.log(1 - 2.0 ** (-5 - torch.arange(4.0)))


def decay(score, b, h, q_idx, kv_idx):
    return score + log_decay[h] * (q_idx - kv_idx)


# %%
# In the library: ``mods.alibi(-log_decay)``.

show.attention(
    score=decay,
    mask=masks.causal(),
    library=mods.alibi(-log_decay),
    heads=4,
    caption="Under the diagonal the bias falls with the distance.",
)
