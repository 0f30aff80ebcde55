"""
Packed documents
================

Several documents lie one after another in a sequence, and tokens see only their own. Training on packed documents
wastes no padding.
"""

import show
import torch

from flex_inductor import masks

lengths = torch.tensor([300, 100, 700, 248, 400, 300])
document_ids = torch.repeat_interleave(torch.arange(6), lengths)


def documents(b, h, q_idx, kv_idx):
    return (document_ids[q_idx] == document_ids[kv_idx]) & (q_idx >= kv_idx)


# %%
# In the library: ``masks.document(lengths=lengths)``. Packed tensors without a batch have
# ``flex_inductor.varlen_attention``.

show.attention(
    mask=documents,
    library=masks.document(lengths=lengths),
    length=2048,
    small={"document_ids": torch.repeat_interleave(torch.arange(5), torch.tensor([9, 4, 17, 8, 10]))},
    caption="Triangles along the diagonal, one for each document, and nothing between them.",
)
