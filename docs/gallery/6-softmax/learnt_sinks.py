"""
Learnt sinks
============

One more score for each head, which takes weight and gives nothing, so that a head can attend to nothing. gpt-oss has
it in every layer, next to a window in every second one.
"""

import show
import torch

window = 128
sinks = torch.tensor([0.5, 2.0])  # learnt: they get gradients


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


# %%
# ``flex_attention(query, key, value, block_mask=mask, sinks=sinks)``.

show.attention(
    mask=sliding_window,
    softmax={"sinks": sinks},
    small={"window": 10},
    lacking="has no sinks",
    caption="A band under the diagonal. The sink is outside of the picture: one more column that all rows see.",
)
