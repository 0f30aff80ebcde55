"""Masks by name. Each constructor returns a plain mask_mod, which torch's FlexAttention takes as well.

In the pictures a row is a query and a column is a key; `#` is attended to, `.` is not.
"""

from .documents import block_diffusion, document, ragged, shared_prefix, tree
from .grid import neighborhood, neighborhood_order
from .positions import causal, dilated_window, global_local, prefix_lm, sliding_window

__all__ = [
    "block_diffusion",
    "causal",
    "dilated_window",
    "document",
    "global_local",
    "neighborhood",
    "neighborhood_order",
    "prefix_lm",
    "ragged",
    "shared_prefix",
    "sliding_window",
    "tree",
]
