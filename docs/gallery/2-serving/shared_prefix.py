"""
Shared prefix
=============

One prompt, and several answers that see the prompt but not each other. It samples or scores many answers in one pass,
as in reinforcement learning with groups.
"""

import show

from flex_inductor import masks

prefix, answer = 640, 176


def shared_prefix(b, h, q_idx, kv_idx):
    same_answer = (q_idx - prefix) // answer == (kv_idx - prefix) // answer
    return (q_idx >= kv_idx) & ((kv_idx < prefix) | same_answer)


# %%
# In the library: ``masks.shared_prefix(prefix, answer)``.

show.attention(
    mask=shared_prefix,
    library=masks.shared_prefix(prefix, answer),
    length=2048,
    small={"prefix": 16, "answer": 8},
    caption="A triangle for the prompt, a column below it, and a small triangle for each answer.",
)
