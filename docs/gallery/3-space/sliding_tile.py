"""
Sliding-tile video
==================

The patches of a video are ordered cube by cube, and a cube sees the cubes around it. So every tile of attention is
seen whole or not at all. Models of video, such as HunyuanVideo and Wan, are sped up with it.
"""

import show

cubes_z, cubes_y, cubes_x = 2, 4, 4  # cubes of 4 x 4 x 4 patches
cube = 64
reach = 1


def sliding_tile(b, h, q_idx, kv_idx):
    q_cube, kv_cube = q_idx // cube, kv_idx // cube
    z = kv_cube // (cubes_y * cubes_x) - q_cube // (cubes_y * cubes_x)
    y = kv_cube // cubes_x % cubes_y - q_cube // cubes_x % cubes_y
    x = kv_cube % cubes_x - q_cube % cubes_x
    return (z.abs() <= reach) & (y.abs() <= reach) & (x.abs() <= reach)


# %%
# In the library: ``masks.neighborhood_order`` gives the order of the patches, to be applied before attention.

show.attention(
    mask=sliding_tile,
    length=2048,
    block=64,
    small={"cube": 8, "cubes_z": 1, "cubes_y": 3, "cubes_x": 3, "length": 72},
    caption="Whole tiles alone, in bands along the diagonal. No tile is partial.",
)
