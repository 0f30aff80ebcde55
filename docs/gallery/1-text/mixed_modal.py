"""
Images within text
==================

Text is causal, while the tokens of an image see each other in both directions. Chameleon-like models, Gemma 3 and
Transfusion read sequences of both.
"""

import show
import torch

image_ids = torch.full((2048,), -1)  # -1 is text
image_ids[200:456] = 0
image_ids[700:956] = 1
image_ids[1500:1756] = 2


def mixed_modal(b, h, q_idx, kv_idx):
    same_image = (image_ids[q_idx] == image_ids[kv_idx]) & (image_ids[q_idx] >= 0)
    return (q_idx >= kv_idx) | same_image


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=mixed_modal,
    length=2048,
    small={"image_ids": torch.tensor([-1] * 5 + [0] * 12 + [-1] * 9 + [1] * 12 + [-1] * 10)},
    caption="A triangle with squares along the diagonal: each image sees the whole of itself.",
)
