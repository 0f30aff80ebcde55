"""
Dropout
=======

Weights are left out at random while a model trains. Here what is left out depends on a seed and the pair's position
alone, so the backward, a repeated step and a sequence spread over processes leave out the same.
"""

import show
import torch

from flex_inductor import AuxRequest, flex_attention, masks

dropout = {"dropout_p": 0.2, "rng_state": (torch.tensor(7), torch.tensor(0))}
empty = torch.zeros(1, 2, 48, 8)
_, aux = flex_attention(empty, empty, empty, return_aux=AuxRequest(dropout_mask=True), **dropout)
kept = aux.dropout_mask

# %%
# ``flex_attention(query, key, value, dropout_p=0.2, rng_state=(seed, offset))``.

show.attention(
    mask=masks.causal(),
    softmax=dropout,
    kept=kept,
    lacking="has no dropout",
    caption="A triangle from which one pair in five is missing, at random.",
)
