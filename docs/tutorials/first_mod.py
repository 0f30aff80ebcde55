"""
A first mod
===========

Attention is a table of scores, a softmax over each row, and a weighted sum of values. A *score_mod* changes one score,
a *mask_mod* says whether a query sees a key. You write both for a single pair, and they become part of one kernel.
"""

# %%
# Scores that fade
# ----------------
#
# A score_mod takes a score and where it is: batch, head, the index of the query, the index of the key. Here scores
# fade with the distance, at another rate in each head. ``rates`` is an ordinary tensor that the function finds in its
# surroundings.
import torch
from matplotlib import pyplot

from flex_inductor import create_block_mask, decisions, flex_attention

torch.manual_seed(0)
rates = torch.tensor([0.002, 0.05])


def fade(score, b, h, q_idx, kv_idx):
    return score - rates[h] * (q_idx - kv_idx).abs()


# %%
# What may be seen
# ----------------
#
# A mask_mod answers yes or no. ``create_block_mask`` finds out which tiles of the table can be skipped, and which need
# no mask at all. It looks at the expression and does not evaluate all pairs.


def recent(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 300)


length = 1024
mask = create_block_mask(recent, None, None, length, length, device="cpu")
print(mask)

# %%
# One call
# --------
#
# Compile the function that calls attention, your whole model in real life, with this backend.


@torch.compile(backend="flex_inductor")
def attend(query, key, value):
    return flex_attention(query, key, value, score_mod=fade, block_mask=mask)


query, key, value = (torch.randn(1, 2, length, 32) for _ in range(3))
out = attend(query, key, value)
print(decisions()[-1])

# %%
# Is it right?
# ------------
#
# The same by the book, in float64 and with the whole table in memory.


def dense(query, key, value):
    row, column = torch.arange(length)[:, None], torch.arange(length)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores - rates[:, None, None] * (row - column).abs()
    scores = scores.masked_fill(~recent(0, 0, row, column), -torch.inf)
    return scores.softmax(-1), scores.softmax(-1) @ value


weights, expected = dense(query.double(), key.double(), value.double())
print(f"largest error: {(out - expected).abs().max():.1e}")

# %%
# What the heads look at
# ----------------------
#
# The last query's weights, averaged over 16 neighbouring keys: the first head looks back about evenly, as far as
# the mask lets it, and the second hardly leaves its place.
figure, axes = pyplot.subplots(figsize=(6.4, 2.8))
for head, row in enumerate(weights[0, :, -1]):
    label = f"head {head}, rate {rates[head]:.3f}"
    axes.plot(range(0, length, 16), row.view(-1, 16).mean(1), label=label)
axes.set(xlabel="key", ylabel="weight", title="Weights of the last query, mean of 16 keys")
axes.legend()

# %%
# Next: :doc:`a bias that learns </made/tutorials/learnable_bias>`, or the
# :doc:`gallery </made/gallery/index>` of masks and mods.
