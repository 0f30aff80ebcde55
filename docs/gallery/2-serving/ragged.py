"""
Ragged lengths
==============

Sequences of different lengths, padded to the longest. Tiles of padding alone are not visited.
"""

import show
import torch

from flex_inductor import masks

lengths = torch.tensor([1024, 300])


def ragged(b, h, q_idx, kv_idx):
    return (q_idx < lengths[b]) & (kv_idx < lengths[b])


# %%
# In the library: ``masks.ragged(lengths)``, where keys may have lengths of their own.

show.attention(
    mask=ragged,
    library=masks.ragged(lengths),
    batch=2,
    at=((1, 0), (0, 0)),
    small={"lengths": torch.tensor([48, 19])},
    caption="Two batches: one fills only the upper left corner of its square, the other all of it.",
)
