"""
Dilated window
==============

A causal window in steps: every eighth token, far back. LongNet stacks windows with different steps.
"""

import show

from flex_inductor import masks

count, step = 64, 8


def dilated(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < count * step) & (distance % step == 0)


# %%
# In the library: ``masks.dilated_window(count, step)``.

show.attention(
    mask=dilated,
    library=masks.dilated_window(count, step),
    small={"count": 6, "step": 4},
    caption="Parallel diagonals with gaps between them, from the main one downwards.",
)
