"""
Global and local
================

A window around each token, and a few tokens that see all and are seen by all. Longformer reads long documents with
it.
"""

import show

from flex_inductor import masks

window, global_tokens = 128, 16


def global_local(b, h, q_idx, kv_idx):
    near = (q_idx - kv_idx).abs() < window
    return near | (q_idx < global_tokens) | (kv_idx < global_tokens)


# %%
# In the library: ``masks.global_local(window, global_tokens)``.

show.attention(
    mask=global_local,
    library=masks.global_local(window, global_tokens),
    length=2048,
    small={"window": 7, "global_tokens": 3},
    caption="A band along the diagonal, a row at the top and a column at the left.",
)
