"""
Softcap
=======

Scores are bent smoothly into a range, so that none can run away. Gemma 2 and Grok 1 are trained with it.
"""

import show
import torch

from flex_inductor import mods

cap = 50.0


def softcap(score, b, h, q_idx, kv_idx):
    return cap * torch.tanh(score / cap)


# %%
# In the library: ``mods.softcap(cap)``.

show.attention(
    score=softcap,
    library=mods.softcap(cap),
    length=1024,
    caption="The new score: as the old one around zero, and never beyond 50.",
)
