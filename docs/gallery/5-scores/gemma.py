"""
Softcap in a window
===================

A score mod and a mask together: Gemma 2 caps its scores, and every second layer sees a window.
"""

import show
import torch

window, cap = 256, 50.0


def gemma_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


def softcap(score, b, h, q_idx, kv_idx):
    return cap * torch.tanh(score / cap)


# %%
# In the library: ``masks.sliding_window(window)`` and ``mods.softcap(cap)``.

show.attention(
    mask=gemma_window,
    score=softcap,
    small={"window": 12},
    caption="A band under the diagonal, and the curve that scores are bent by.",
)
