"""
Soft window
===========

A window without a border: near keys are free, and each step beyond costs a little more.
"""

import show

from flex_inductor import mods

radius, slope = 128, 0.05


def soft_window(score, b, h, q_idx, kv_idx):
    return score - slope * ((q_idx - kv_idx).abs() - radius).clamp(min=0)


# %%
# In the library: ``mods.soft_distance(radius, slope)``.

show.attention(
    score=soft_window,
    library=mods.soft_distance(radius, slope),
    small={"radius": 8},
    caption="No bias within a band along the diagonal; beyond it the penalty grows towards the corners.",
)
