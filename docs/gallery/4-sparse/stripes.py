"""
Stripes
=======

A local window and every 64th token as a summary of what is far away. Sparse Transformers have this "fixed" pattern.
"""

import show

window, stride = 128, 64


def stripes(b, h, q_idx, kv_idx):
    near = q_idx - kv_idx < window
    summary = kv_idx % stride == stride - 1
    return (q_idx >= kv_idx) & (near | summary)


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=stripes,
    small={"window": 8, "stride": 6},
    caption="A band under the diagonal, and thin columns at equal distances below it.",
)
