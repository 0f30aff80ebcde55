"""
Prefix LM
=========

All tokens see the prompt, in both directions within it; the answer is causal. T5's and PaliGemma's decoders read
prompts this way.
"""

import show

from flex_inductor import masks

prefix = 512


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx < prefix) | (q_idx >= kv_idx)


# %%
# In the library: ``masks.prefix_lm(prefix)``, where a tensor gives each batch its own prefix.

show.attention(
    mask=prefix_lm,
    library=masks.prefix_lm(prefix),
    length=2048,
    small={"prefix": 16},
    caption="A triangle joined to a band on the left: every query sees the prefix, and the keys up to its own.",
)
