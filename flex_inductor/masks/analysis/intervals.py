"""Values by their bounds.

An `Interval` describes many values at once: element i of `lo` and `hi` encloses every value the step
takes on rectangle i. Integers of any width are held as int64, floats in their own dtype (rounding to
nearest is monotone, so an operation rounded at the end points encloses every rounded result), booleans
as bool: (False, False) is never, (True, True) always, (False, True) mixed.

`least` and `most` enclose the whole tensor and are exact Python numbers. They answer, once for the whole
step, whether anything could wrap around in the step's own dtype; if it could, nothing is claimed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...mod_ir.ranges import Order, Range, all_known

Number = int | float
INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Interval:
    lo: Tensor
    hi: Tensor
    dtype: torch.dtype
    least: Number
    most: Number
    nan: bool = False

    @property
    def ends(self) -> Range:
        """Of each rectangle."""
        return Range(self.lo, self.hi)

    @property
    def outer(self) -> Range:
        """Of the whole tensor."""
        return Range(self.least, self.most)

    @staticmethod
    def unknown(dtype: torch.dtype, device: torch.device) -> Interval:
        """Every value of the dtype."""
        if dtype == torch.bool:
            return Interval.boolean(torch.tensor(False, device=device), torch.tensor(True, device=device))
        if dtype in FLOAT_DTYPES:
            ends = torch.tensor([-math.inf, math.inf], dtype=dtype, device=device)
            return Interval(ends[0], ends[1], dtype, -math.inf, math.inf, nan=True)
        info = torch.iinfo(dtype)
        ends = torch.tensor([info.min, info.max], device=device)
        return Interval(ends[0], ends[1], dtype, info.min, info.max)

    @staticmethod
    def boolean(always: Tensor, possible: Tensor) -> Interval:
        return Interval(always, possible, torch.bool, 0, 1)

    @staticmethod
    def floating(lo: Tensor, hi: Tensor, nan: bool) -> Interval:
        return Interval(lo, hi, lo.dtype, lo.min().item(), hi.max().item(), nan)

    @staticmethod
    def constant(value: Number | bool, dtype: torch.dtype, device: torch.device) -> Interval | None:
        """None where the number does not fit: torch would wrap it or refuse it."""
        if dtype == torch.bool:
            point = torch.tensor(bool(value), device=device)
            return Interval.boolean(point, point)
        if dtype in FLOAT_DTYPES:
            point = torch.tensor(value, dtype=dtype, device=device)
            # torch keeps a number in fp32 when it meets a 16-bit tensor.
            if math.isnan(value) or (dtype.itemsize == 2 and point.item() != value):
                return None
            return Interval.floating(point, point, False)
        if not fits(value, value, dtype) or value != int(value):
            return None
        point = torch.tensor(int(value), device=device)
        return Interval(point, point, dtype, int(value), int(value))


def _greater(a: Tensor, b: Tensor | Number) -> Tensor:
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


TENSORS = Order(torch.minimum, _greater)

Operand = Interval | int | float | bool


def fits(least: Number, most: Number, dtype: torch.dtype) -> bool:
    info = torch.finfo(dtype) if dtype in FLOAT_DTYPES else torch.iinfo(dtype)
    return info.min <= least and most <= info.max


def integers(lo: Tensor, hi: Tensor, dtype: torch.dtype, least: Number, most: Number) -> Interval | None:
    return Interval(lo, hi, dtype, least, most) if fits(least, most, dtype) else None


def interval_of(ends: Range, dtype: torch.dtype, outer: Range, nan: bool) -> Interval | None:
    """An interval of either kind; `outer` is exact and used for integers only."""
    if dtype in INT_DTYPES:
        return integers(*ends, dtype, *outer)
    made = Interval.floating(*ends, nan)
    return made if math.isfinite(made.least) and math.isfinite(made.most) else None


def convert(x: Interval | None, dtype: torch.dtype) -> Interval | None:
    """The cast of every value in `x`, or None where values could wrap."""
    if x is None or x.dtype == dtype:
        return x
    if dtype == torch.bool:
        possible = (x.lo != 0) | (x.hi != 0)
        return Interval.boolean((x.lo > 0) | (x.hi < 0), torch.ones_like(possible) if x.nan else possible)
    if x.dtype == torch.bool:
        whole = Interval(x.lo.long(), x.hi.long(), torch.int64, 0, 1)
        return convert(Interval(whole.lo, whole.hi, dtype, 0, 1) if dtype in INT_DTYPES else whole, dtype)
    if dtype in FLOAT_DTYPES:
        if x.dtype in FLOAT_DTYPES or fits(x.least, x.most, dtype):
            return Interval.floating(x.lo.to(dtype), x.hi.to(dtype), x.nan)
        return None
    if dtype not in INT_DTYPES:
        return None
    if x.dtype in FLOAT_DTYPES:
        # 2**63 is a float and one more than the largest int64.
        if x.nan or not (x.least > -(2.0**62) and x.most < 2.0**62):
            return None
        return integers(x.lo.long(), x.hi.long(), dtype, math.trunc(x.least), math.trunc(x.most))
    return integers(x.lo, x.hi, dtype, x.least, x.most)


@functools.cache
def _promoted(kinds: tuple[torch.dtype | type, ...], default: torch.dtype) -> torch.dtype:
    """torch's promotion of 0-d tensors and Python numbers; `default` is part of the cache key."""
    tensors = [torch.empty((), dtype=k) for k in kinds if isinstance(k, torch.dtype)]
    numbers = [k(1) for k in kinds if isinstance(k, type)]
    whole = functools.reduce(lambda a, b: torch.empty((), dtype=torch.result_type(a, b)), tensors)
    return functools.reduce(lambda a, b: torch.result_type(torch.empty((), dtype=a), b), numbers, whole.dtype)


def promoted(*operands: Operand) -> torch.dtype:
    kinds = tuple(x.dtype if isinstance(x, Interval) else type(x) for x in operands)
    return _promoted(kinds, torch.get_default_dtype())


def as_dtype(dtype: torch.dtype, *operands: Operand) -> list[Interval] | None:
    """The operands in one dtype, or None if one of them does not go into it unchanged."""
    device = next(x.lo.device for x in operands if isinstance(x, Interval))
    return all_known(
        convert(x, dtype) if isinstance(x, Interval) else Interval.constant(x, dtype, device)
        for x in operands
    )
