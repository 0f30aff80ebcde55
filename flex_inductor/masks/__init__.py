"""Block masks: built from the mask's own expression, combined, drawn, and a library of masks."""

from .draw import draw_mask, load_ipython_extension
from .library import (
    block_diffusion,
    causal,
    dilated_window,
    document,
    global_local,
    neighborhood,
    neighborhood_order,
    prefix_lm,
    ragged,
    shared_prefix,
    sliding_window,
    tree,
)
from .library.algebra import not_mask, offset
from .library.blockmask import create_block_mask
from .library.combine import intersect, unite
from .schedule import RunSchedule

__all__ = [
    "RunSchedule",
    "block_diffusion",
    "causal",
    "create_block_mask",
    "dilated_window",
    "document",
    "draw_mask",
    "global_local",
    "intersect",
    "load_ipython_extension",
    "neighborhood",
    "neighborhood_order",
    "not_mask",
    "offset",
    "prefix_lm",
    "ragged",
    "shared_prefix",
    "sliding_window",
    "tree",
    "unite",
]
