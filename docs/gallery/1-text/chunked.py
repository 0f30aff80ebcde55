"""
Chunked attention
=================

The sequence is cut into chunks, and a token sees what came before it in its own chunk. Llama 4 has such layers, with
chunks of 8,192 tokens, between layers that see everything.
"""

import show

chunk = 320


def chunked(b, h, q_idx, kv_idx):
    return (q_idx // chunk == kv_idx // chunk) & (q_idx >= kv_idx)


# %%
# The library has no name for it: the function is enough.

show.attention(
    mask=chunked,
    length=2048,
    small={"chunk": 11},
    caption="Equal triangles along the diagonal, one for each chunk. Chunks do not end where tiles do.",
)
