"""Exact bounds of everything that depends on q alone or on kv alone.

A value that does not depend on both q and kv (`doc[q]`, `kv % 128 < 3`, a hash of q) is computed for
every position, whatever operations it is made of, and reduced to its minimum and maximum over each tile.
Rectangles are aligned ranges of tiles, so coarser levels are reductions of finer ones. Nothing is kept
between calls: a capture changed in place cannot leave a stale table behind.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ...mod_ir.recorder import READS
from ..runs import Extent
from .intervals import FLOAT_DTYPES, INT_DTYPES, Interval, Number
from .trace import MaskGraph, dtype_of

POINTS_AT_ONCE = 1 << 18


class Table:
    """Per tile, the least and greatest value of one-sided nodes; [batch, heads, tiles], 1 where constant."""

    def __init__(self, lo: Tensor, hi: Tensor, dtype: torch.dtype, nan: bool) -> None:
        self.dtype = dtype
        self.levels = {1: (lo, hi)}
        self.least: Number
        self.most: Number
        if dtype == torch.bool:
            self.least, self.most = 0, 1
        else:
            self.least, self.most = lo.min().item(), hi.max().item()
        self.nan = nan

    def at(self, scale: int, b: Tensor, h: Tensor, tile: Tensor) -> Interval:
        """Bounds over the aligned groups of `scale` tiles, one for each (b, h, tile)."""
        lo, hi = self._level(scale)
        if lo.numel() == 1:
            lo, hi = lo.reshape(()), hi.reshape(())
        else:
            batch, heads, tiles = lo.shape
            where = tile if tiles > 1 else 0
            if heads > 1:
                where = h * tiles + where
            if batch > 1:
                where = b * (heads * tiles) + where
            lo, hi = lo.view(-1)[where], hi.view(-1)[where]
        return Interval(lo, hi, self.dtype, self.least, self.most, self.nan)

    def _level(self, scale: int) -> tuple[Tensor, Tensor]:
        if scale not in self.levels:
            lo, hi = self.levels[1]
            self.levels[scale] = (_grouped(lo, scale)[0], _grouped(hi, scale)[1])
        return self.levels[scale]


def _grouped(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each run of `size` along the last dimension, the last one maybe shorter."""
    short = -values.shape[-1] % size
    if short:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], short)], dim=-1)
    low, high = values.unflatten(-1, (-1, size)).aminmax(dim=-1)
    return low, high


def build_tables(mask: MaskGraph, nodes: list[fx.Node], extent: Extent) -> dict[fx.Node, Table]:
    """Tables of those `nodes` whose dtype has an order. Nodes of one side share one pass over the positions."""
    tables: dict[fx.Node, Table] = {}
    sides: dict[frozenset[str], list[fx.Node]] = {}
    for node in nodes:
        if dtype_of(node) in (*INT_DTYPES, *FLOAT_DTYPES, torch.bool):
            sides.setdefault(node.meta[READS], []).append(node)
    for reads, members in sides.items():
        tables.update(zip(members, _tabulate(mask, members, reads, extent), strict=True))
    return tables


def _tabulate(mask: MaskGraph, members: list[fx.Node], reads: frozenset[str], extent: Extent) -> list[Table]:
    side = 1 if "kv" in reads else 0
    runs_along = bool(reads & {"q", "kv"})
    length, block = (extent.lengths[side], extent.block[side]) if runs_along else (1, 1)
    batch = extent.batch if "b" in reads else 1
    heads = extent.heads if "h" in reads else 1
    function = torch.vmap(mask.function(*members))
    stride = max(1, POINTS_AT_ONCE // block) * block
    pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in members]
    nans = [False] * len(members)
    device = mask.device
    for row in range(batch * heads):
        for start in range(0, length, stride):
            position = torch.arange(start, min(start + stride, length), device=device)
            b = torch.full_like(position, row // heads)
            h = torch.full_like(position, row % heads)
            values = function(b, h, position, position)
            for i, value in enumerate(values if isinstance(values, tuple) else (values,)):
                if value.is_floating_point():
                    missing = value.isnan()
                    if missing.any():
                        nans[i] = True
                        value = value.masked_fill(missing, 0)
                pieces[i].append(_grouped(value, block))
    tables = []
    for i, member in enumerate(members):
        dtype = member.meta["val"].dtype
        kept = dtype if dtype in (*FLOAT_DTYPES, torch.bool) else torch.int64
        lo, hi = (torch.cat(ends).view(batch, heads, -1).to(kept) for ends in zip(*pieces[i], strict=True))
        tables.append(Table(lo, hi, dtype, nans[i]))
    return tables
