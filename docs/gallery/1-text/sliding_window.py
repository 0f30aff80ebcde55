"""
Sliding window
==============

A token sees itself and a fixed number of tokens before it, so that cost grows with the length and not with its
square. Mistral, Gemma and gpt-oss have layers of it.
"""

import show

from flex_inductor import masks

window = 256


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


# %%
# In the library: ``masks.sliding_window(window)``.

show.attention(
    mask=sliding_window,
    library=masks.sliding_window(window),
    length=2048,
    small={"window": 12},
    caption="A band under the diagonal: a query sees itself and the keys shortly before it.",
)
