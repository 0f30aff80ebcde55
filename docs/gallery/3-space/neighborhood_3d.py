"""
3-D neighbourhood
=================

The neighbourhood of a voxel in space, or of a patch in a video: near in time, height and width.
"""

import show

from flex_inductor import masks

depth, height, width = 8, 16, 16
window = 5


def neighborhood(b, h, q_idx, kv_idx):
    q_z, q_y, q_x = q_idx // (height * width), q_idx // width % height, q_idx % width
    kv_z, kv_y, kv_x = kv_idx // (height * width), kv_idx // width % height, kv_idx % width
    z = q_z.clamp(window // 2, depth - 1 - window // 2)
    y = q_y.clamp(window // 2, height - 1 - window // 2)
    x = q_x.clamp(window // 2, width - 1 - window // 2)
    near = ((kv_z - z).abs() <= window // 2) & ((kv_y - y).abs() <= window // 2)
    return near & ((kv_x - x).abs() <= window // 2)


# %%
# In the library: ``masks.neighborhood((depth, height, width), window)``.

show.attention(
    mask=neighborhood,
    library=masks.neighborhood((depth, height, width), window),
    length=depth * height * width,
    small={"depth": 4, "height": 4, "width": 4, "window": 3, "length": 64},
    caption="Bands of bands: planes around the diagonal, in each of them rows, in each row dashes.",
)
