"""Bounds of a captured tensor over a box of its indices.

`table[q - kv + n]` and `mask[q, kv]` read a range that belongs to no single tile. A pyramid holds minima
and maxima of cells of 2, 4, 8, ... entries along every dimension that is read by range; a range is covered
by at most two cells of the first level whose cells are nearly as long as the range.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .intervals import FLOAT_DTYPES, INT_DTYPES, Interval

MAX_RANGED_DIMS = 3


class Pyramid:
    def __init__(self, values: Tensor, ranged: tuple[bool, ...]) -> None:
        """`ranged` says which dimensions are read by range; the others are read at one index at a time."""
        self.dtype = values.dtype
        self.shape = values.shape
        self.ranged = ranged
        if values.dtype in INT_DTYPES:
            values = values.long()
        missing = values.isnan() if values.is_floating_point() else None
        self.nan = missing is not None and bool(missing.any())
        low = high = values if missing is None else values.masked_fill(missing, 0)
        lows, highs, shapes = [low.reshape(-1)], [high.reshape(-1)], [low.shape]
        while any(n > 1 and r for n, r in zip(low.shape, ranged, strict=True)):
            for dim in (d for d, r in enumerate(ranged) if r):
                low, high = _halved(low, dim, torch.minimum), _halved(high, dim, torch.maximum)
            lows.append(low.reshape(-1))
            highs.append(high.reshape(-1))
            shapes.append(low.shape)
        self.low, self.high = torch.cat(lows), torch.cat(highs)
        self.sizes = torch.tensor([list(s) for s in shapes], device=values.device)
        self.starts = torch.tensor(
            [0, *itertools.accumulate(s.numel() for s in shapes)][:-1], device=values.device
        )
        self.least, self.most = (0, 1) if self.dtype == torch.bool else (low.min().item(), high.max().item())

    def over(self, indices: list[Interval]) -> Interval:
        """Bounds over the box of `indices`, one for each dimension; a negative index counts from the end."""
        clipped = [_in_range(index, size) for index, size in zip(indices, self.shape, strict=True)]
        flat_ends = torch.broadcast_tensors(*itertools.chain(*clipped))
        ends = list(zip(flat_ends[::2], flat_ends[1::2], strict=True))
        span = torch.stack([hi - lo for (lo, hi), r in zip(ends, self.ranged, strict=True) if r]).amax(0)
        # Ends at most one cell's length apart are in one cell or in neighbouring ones.
        level = torch.zeros_like(span)
        for k in range(len(self.starts) - 1):
            level += span > (1 << k)
        corners = itertools.product(*[(0, 1) if r else (0,) for r in self.ranged])
        lows, highs = [], []
        for corner in corners:
            flat = torch.zeros_like(level)
            for dim, which in enumerate(corner):
                cell = ends[dim][which] >> level if self.ranged[dim] else ends[dim][0]
                flat = flat * self.sizes[level, dim] + cell
            flat += self.starts[level]
            lows.append(self.low[flat])
            highs.append(self.high[flat])
        lo, hi = functools.reduce(torch.minimum, lows), functools.reduce(torch.maximum, highs)
        return Interval(lo, hi, self.dtype, self.least, self.most, self.nan)


def _halved(values: Tensor, dim: int, op: Callable) -> Tensor:
    every_second = [(*[slice(None)] * dim, slice(first, None, 2)) for first in (0, 1)]
    even, odd = (values[entries] for entries in every_second)
    pairs = op(even.narrow(dim, 0, odd.shape[dim]), odd)
    return torch.cat([pairs, even.narrow(dim, odd.shape[dim], even.shape[dim] - odd.shape[dim])], dim=dim)


def _in_range(index: Interval, size: int) -> tuple[Tensor, Tensor]:
    """End points as positions from 0 on; an index beyond the tensor raises when it is evaluated, not here."""
    lo, hi = index.lo, index.hi
    if index.least < 0:
        negative, crossing = hi < 0, (lo < 0) & (hi >= 0)
        lo = torch.where(negative, lo + size, lo)
        hi = torch.where(negative, hi + size, torch.where(crossing, size - 1, hi))
    return lo.clamp(0, size - 1), hi.clamp(0, size - 1)


def readable(values: Tensor, ranged: tuple[bool, ...]) -> bool:
    dtypes = (*INT_DTYPES, *FLOAT_DTYPES, torch.bool)
    return values.dtype in dtypes and values.numel() > 0 and 0 < sum(ranged) <= MAX_RANGED_DIMS
