"""
Pack documents
==============

Training on padded batches wastes the padding. Packing puts documents one after the other, and the mask keeps them
apart. Here are both ways to say it: a mask over one long row, and sequences of any lengths without a batch.
"""

# %%
# One long row
# ------------
#
# Six documents, 1,024 tokens, and the number of its document for each token.
import torch
from matplotlib import pyplot

from flex_inductor import (
    Sequences,
    create_block_mask,
    draw_mask,
    flex_attention,
    masks,
    varlen_attention,
)

torch.manual_seed(0)
lengths = [310, 42, 200, 96, 256, 120]
length = sum(lengths)
document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def within(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])


# %%
# Make the mask on every step: new documents are new numbers in a tensor, and recompile nothing.
mask = create_block_mask(within, None, None, length, length, device="cpu", BLOCK_SIZE=32)
figure = draw_mask(mask, zoom=(9, 9))
print(f"pairs in tiles that are skipped: {mask.sparsity():.0f}%")

# %%
# ``masks.document`` makes the same function, from lengths, offsets or ids. Its mask has less to say, and so is made
# and read faster.
same = masks.document(lengths=lengths)
library = create_block_mask(same, None, None, length, length, device="cpu", BLOCK_SIZE=32)
print("the same tiles:", torch.equal(library.to_dense(), mask.to_dense()))

# %%
# Does anything leak?
# -------------------
#
# Each document alone must give what it gives in the row.
query, key, value = torch.randn(3, 1, 2, length, 32)
packed = flex_attention(query, key, value, block_mask=mask)
begin, worst = 0, 0.0
for size in lengths:
    part = slice(begin, begin + size)
    causal = create_block_mask(masks.causal(), None, None, size, size, device="cpu")
    alone = flex_attention(*(x[:, :, part] for x in (query, key, value)), block_mask=causal)
    worst = max(worst, (packed[:, :, part] - alone).abs().max().item())
    begin += size
print(f"largest difference: {worst:.1e}")

# %%
# Without a batch
# ---------------
#
# ``varlen_attention`` takes tokens as ``[tokens, heads, head_dim]``. Positions begin at 0 in each sequence, which a
# bias by position wants, and tiles begin where sequences do: a sequence has the same bits in any company.
sequences = Sequences.from_lengths(lengths)
causal = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
rows = [x[0].transpose(0, 1) for x in (query, key, value)]
out = varlen_attention(*rows, sequences, block_mask=causal)
print(f"largest difference: {(out.transpose(0, 1) - packed[0]).abs().max():.1e}")

# %%
# What is saved
# -------------
#
# Pairs of a query and a key that a kernel computes, by tiles of 32.
pairs = {
    "padded, causal": len(lengths) * max(lengths) ** 2 / 2,
    "one row, leaking": length**2 / 2,
    "packed": length**2 * (1 - mask.sparsity() / 100),
}
figure, axes = pyplot.subplots(figsize=(6.4, 1.9))
axes.barh([*pairs], [*pairs.values()], color=["C1", "C1", "C0"])
axes.invert_yaxis()
axes.set(xlabel="pairs", title="Pairs to compute for six documents")

# %%
# To see whether your own model keeps documents apart, gradients included: ``flex-inductor check``
# (:doc:`/check`). More of sequences, caches and pages: :doc:`/sequences`.
