"""
ALiBi
=====

A penalty that grows with the distance, steeper for some heads, in place of position embeddings. BLOOM and MPT are
trained with it, and read more tokens than they were trained on.
"""

import show

from flex_inductor import masks, mods

slopes = mods.alibi_slopes(4)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


# %%
# In the library: ``mods.alibi(slopes)``. Slopes that require gradients get them.

show.attention(
    score=alibi,
    mask=masks.causal(),
    library=mods.alibi(slopes),
    length=1024,
    heads=4,
    at=((0, 0), (0, 2)),
    caption="Two heads: the bias falls with the distance from the diagonal, in the second head more slowly.",
)
