"""
Attention sinks
===============

A window, and the first few tokens, which all later tokens keep seeing. StreamingLLM found that models put weight on
the first tokens, and break when a cache drops them.
"""

import show

window, first = 256, 4


def streaming(b, h, q_idx, kv_idx):
    near = q_idx - kv_idx < window
    return (q_idx >= kv_idx) & (near | (kv_idx < first))


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=streaming,
    length=2048,
    small={"window": 10, "first": 3},
    caption="A band under the diagonal, and a thin column at the left: every query sees the first keys too.",
)
