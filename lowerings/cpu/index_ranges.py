"""Whether an index that a lane computes can leave the tensor it looks up."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.virtualized import V

aten = torch.ops.aten


def in_range(index: Any, length: Any, sizes: dict[str, Any]) -> bool:
    """Whether 0 <= index < length for every lane; False where that is not evident.

    `sizes` gives the number of batches, heads, queries and keys by the name of the lane.
    """
    bounds = _bounds(index, sizes)
    if bounds is None:
        return False
    low, high = bounds
    known = V.graph.sizevars.statically_known_leq
    return known(0, low) and known(high, length - 1)


def _bounds(value: Any, sizes: dict[str, Any]) -> tuple[Any, Any] | None:
    """The least and the greatest value, as expressions of sizes."""
    if isinstance(value, int):
        return sympy.Integer(value), sympy.Integer(value)
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        return (sympy.S.Zero, sizes[value.name] - 1) if value.name in sizes else None
    if "val" not in value.meta or value.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    if value.target is aten._to_copy.default:
        return _bounds(value.args[0], sizes)
    rule = _RULES.get(value.target)
    if rule is None or value.kwargs:
        return None
    arguments = [_bounds(argument, sizes) for argument in value.args]
    return None if None in arguments else rule(*arguments)


def _multiply(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any] | None:
    for (low, high), (factor, same) in ((left, right), (right, left)):
        if factor == same and factor.is_Integer:
            ends = (low * factor, high * factor)
            return ends if factor >= 0 else (ends[1], ends[0])
    return None


def _remainder(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any] | None:
    low, high = right
    return (sympy.S.Zero, high - 1) if low == high and low.is_positive else None


def _clamp(value: tuple[Any, Any], low: tuple[Any, Any], high: tuple[Any, Any]) -> tuple[Any, Any] | None:
    return (low[0], high[1]) if low[1].is_Integer and high[0].is_Integer and low[1] <= high[0] else None


_RULES: dict[Any, Any] = {
    aten.add.Tensor: lambda x, y: (x[0] + y[0], x[1] + y[1]),
    aten.sub.Tensor: lambda x, y: (x[0] - y[1], x[1] - y[0]),
    aten.neg.default: lambda x: (-x[1], -x[0]),
    aten.mul.Tensor: _multiply,
    aten.remainder.Scalar: _remainder,
    aten.clamp.default: _clamp,
}
