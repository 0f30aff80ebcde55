"""Which tiles hold an equal value.

For `ids[q] == ids[kv]` with ids in no order, two tiles may have overlapping ranges but no common value. If ranges
decide little, the tiles of each value are looked up instead. The time grows with the number of tokens, and of pairs of
tiles with a common value.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ...mod_ir.recorder import READS
from ..runs import Extent, counted
from .intervals import INT_DTYPES
from .tables import POINTS_AT_ONCE
from .trace import INDEX_NAMES, MaskGraph, dtype_of

aten = torch.ops.aten

MOST_PAIRS = 1 << 20  # with more, most tiles have a common value and few are ruled out


def meetings_of(mask: MaskGraph, extent: Extent) -> dict[fx.Node, Tensor]:
    """For each node `x[q] == y[kv]` on integers, the pairs of tiles with a common value: q * columns + kv, in order."""
    found = {}
    for node in mask.needed([mask.output]):
        if node.target is not aten.eq.Tensor:
            continue
        sides = {side.meta[READS]: side for side in node.all_input_nodes}
        if sides.keys() != {frozenset({"q"}), frozenset({"kv"})}:
            continue
        if not {dtype_of(side) for side in sides.values()} <= {*INT_DTYPES}:
            continue
        values = [
            _along(mask, sides[frozenset({name})], length)
            for name, length in zip(INDEX_NAMES[2:], extent.lengths, strict=True)
        ]
        pairs = _meeting_tiles(values, extent)
        if pairs is not None:
            found[node] = pairs
    return found


def contains(ordered: Tensor, keys: Tensor) -> Tensor:
    """Which of the keys are among the ordered ones."""
    if ordered.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    return ordered[torch.searchsorted(ordered, keys).clamp(max=ordered.numel() - 1)] == keys


def _along(mask: MaskGraph, node: fx.Node, length: int) -> Tensor:
    """The values of a node at every position of its side."""
    function = torch.vmap(mask.function(node))
    parts = []
    for position in torch.arange(length, device=mask.device).split(POINTS_AT_ONCE):
        nowhere = torch.zeros_like(position)
        parts.append(function(nowhere, nowhere, position, position))
    return torch.cat(parts)


def _meeting_tiles(values: list[Tensor], extent: Extent) -> Tensor | None:
    lengths = [v.numel() for v in values]
    distinct, rank = torch.unique(torch.cat(values), return_inverse=True)
    sides = []
    for ranks, tiles, block in zip(rank.split(lengths), extent.tiles, extent.block, strict=True):
        tile = torch.arange(ranks.numel(), device=ranks.device) // block
        held = torch.unique(ranks * tiles + tile)  # the tiles of each value, value by value
        counts = torch.bincount(held // tiles, minlength=distinct.numel())
        sides.append((held % tiles, counts, counts.cumsum(0) - counts))
    (q_tile, q_counts, q_first), (kv_tile, kv_counts, kv_first) = sides
    pairs = q_counts * kv_counts
    if int(pairs.sum()) > MOST_PAIRS:
        return None
    value, within = counted(pairs)
    q = q_tile[q_first[value] + within // kv_counts[value]]
    kv = kv_tile[kv_first[value] + within % kv_counts[value]]
    return torch.unique(q * extent.tiles[1] + kv)
