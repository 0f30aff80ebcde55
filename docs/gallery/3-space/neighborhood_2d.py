"""
2-D neighbourhood
=================

Each pixel of an image sees the pixels around it. At a border the window moves inwards, so that all see equally many.
NATTEN made this attention known.
"""

import show

from flex_inductor import masks

height, width, window = 32, 32, 9


def neighborhood(b, h, q_idx, kv_idx):
    q_y, q_x = q_idx // width, q_idx % width
    kv_y, kv_x = kv_idx // width, kv_idx % width
    y = q_y.clamp(window // 2, height - 1 - window // 2)  # the middle of the window
    x = q_x.clamp(window // 2, width - 1 - window // 2)
    return ((kv_y - y).abs() <= window // 2) & ((kv_x - x).abs() <= window // 2)


# %%
# In the library: ``masks.neighborhood((height, width), window)``. With ``tile=`` the pixels are ordered patch by patch,
# and fewer tiles are visited: see :doc:`sliding-tile video </made/gallery/3-space/sliding_tile>`.

show.attention(
    mask=neighborhood,
    library=masks.neighborhood((height, width), window),
    length=height * width,
    small={"height": 8, "width": 8, "window": 3, "length": 64},
    caption="Bands along the diagonal, broken into dashes: one dash for each row of the window.",
)
