"""
Dilated neighbourhood
=====================

A window with gaps: a pixel sees every second pixel around it, and so twice as far for the same cost. DiNAT alternates
such layers with dense ones.
"""

import show

height, width, reach, dilation = 32, 32, 8, 2


def dilated_neighborhood(b, h, q_idx, kv_idx):
    down = kv_idx // width - q_idx // width
    right = kv_idx % width - q_idx % width
    near = (down.abs() <= reach) & (right.abs() <= reach)
    return near & (down % dilation == 0) & (right % dilation == 0)


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=dilated_neighborhood,
    length=height * width,
    small={"height": 8, "width": 8, "reach": 4, "length": 64},
    caption="Dots in every second column of every second band along the diagonal.",
)
