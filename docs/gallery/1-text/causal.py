"""
Causal
======

Every token sees itself and what came before. All decoder language models are trained with it.
"""

import show

from flex_inductor import masks


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# %%
# In the library: ``masks.causal()``.

show.attention(
    mask=causal,
    library=masks.causal(),
    length=2048,
    caption="A triangle: a query sees all keys up to its own.",
)
