"""Whether a lane's index can leave its tensor, from ranges whose ends are expressions of sizes.

Ranges are those of exact integers. If sums or products wrap around, a result that fits its dtype is still right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from flex_inductor.mod_ir.ranges import Order, Range, Walk, operation

INTEGERS = (torch.int32, torch.int64)
LONGEST = 2**31 - 1  # indices have 32 bits
FOUND = "range"  # in a node's meta: the range of what it loads from a table, if known
# All others need operands that have not wrapped around.
_MODULAR = ("add", "mul", "neg", "sub")
_OF_TRUTH = ("logical_and", "logical_not", "logical_or", "logical_xor")


class NoMore(NamedTuple):
    """A condition: one number is at most another."""

    less: Any
    more: Any


def bounds_of(sizes: dict[str, Any]) -> dict[str, Range]:
    """The range of each coordinate, 0 to its size - 1, by name."""
    return {name: Range(sympy.S.Zero, sympy.sympify(size) - 1) for name, size in sizes.items()}


def needed(index: Any, length: Any, bounds: dict[str, Range]) -> set[NoMore] | None:
    """The conditions for 0 <= index < length in every lane that are not evident; None if nothing is known.

    `bounds` are those of b, h, q_idx and kv_idx, by name.
    """
    found = _walk(bounds).range(index)
    if found is None:
        return None
    found = Range(*map(sympy.sympify, found))
    if any(end.has(sympy.floor) for end in found):  # of lengths that change
        return None
    conditions = {NoMore(sympy.S.Zero, found.least), NoMore(found.most, sympy.sympify(length) - 1)}
    if not _fits(found, torch.int32):
        conditions.add(NoMore(sympy.sympify(length) - 1, sympy.Integer(LONGEST)))
    return {pair for pair in conditions if not V.graph.sizevars.statically_known_leq(*pair)}


def range_of(node: fx.Node, bounds: dict[str, Range]) -> Range | None:
    """The least and the greatest value of a node in any lane, if known."""
    return _walk(bounds).range(node)


def may_wrap(node: fx.Node, bounds: dict[str, Range]) -> bool:
    """Whether a sum or product of indices may be too large for its dtype.

    Lengths that change count as at most 2^30, so that a distance with a number added still fits.
    """
    found = _walk(bounds).range(node) if operation(node.target) in _MODULAR else None
    return found is not None and not _fits(found, node.meta["val"].dtype, 2**30)


def shortened(node: fx.Node, bounds: dict[str, Range]) -> list[fx.Node]:
    """The indices that an operation reads as truth values, narrows or rounds."""
    name, to = operation(node.target), getattr(node.meta.get("val"), "dtype", None)
    if name not in _OF_TRUTH and (name != "_to_copy" or to in (torch.int64, torch.float32, torch.float64)):
        return []
    given = [x for x in node.args if isinstance(x, fx.Node) and x.meta["val"].dtype in INTEGERS]
    if to != torch.int32:
        return given
    ranges = [(x, _walk(bounds).range(x)) for x in given]
    return [x for x, found in ranges if found is None or not _fits(found, to, 2**30)]


def _walk(bounds: dict[str, Range]) -> Walk:
    """Over a lane graph, with ends that are expressions of sizes. `bounds` are those of its arguments, by name."""

    def known(value: Any) -> Range | None:
        if isinstance(value, int):
            return Range(sympy.Integer(value), sympy.Integer(value))
        if not isinstance(value, fx.Node):
            return None
        return bounds.get(value.name) if value.op == "placeholder" else value.meta.get(FOUND)

    return Walk(Order(sympy.Min, sympy.Max), known, _made, _exact)


def _made(value: Any) -> tuple[str, Any]:
    if not isinstance(value, fx.Node) or getattr(value.meta.get("val"), "dtype", None) not in INTEGERS:
        return "", ()
    name = operation(value.target)
    if name == "_to_copy":
        return "same", value.args
    if name == "floor_divide" or (name == "div" and value.kwargs == {"rounding_mode": "floor"}):
        return "quotient", value.args
    return ("" if value.kwargs else name), value.args


def _exact(value: fx.Node, name: str, operands: Sequence[Any], ranges: Sequence[Any]) -> list[Any] | None:
    if name in ("quotient", "remainder") and not (isinstance(operands[1], int) and operands[1] > 0):
        return None
    dtype, found = value.meta["val"].dtype, []
    for operand, range_of in zip(operands, ranges, strict=True):
        own = operand.meta["val"].dtype if isinstance(operand, fx.Node) else dtype
        matters = range_of is not None and (name not in _MODULAR or own != dtype)
        found.append(_wrapped_or_not(range_of, own) if matters and not _fits(range_of, own) else range_of)
    return found


def _fits(found: Range, dtype: torch.dtype, longest: int = LONGEST) -> bool:
    """Whether nothing can have wrapped around, with sizes that are at most `longest`."""
    info = torch.iinfo(dtype)
    least, most = (
        bound_sympy(
            end, {s: ValueRanges(0 if s.is_nonnegative else -longest, longest) for s in end.free_symbols}
        )
        for end in map(sympy.sympify, found)
    )
    return bool(least.lower >= info.min and most.upper <= info.max)


def _wrapped_or_not(found: Range, dtype: torch.dtype) -> Range:
    """Inductor's index expressions do not wrap around; its loops do."""
    info = torch.iinfo(dtype)
    return Range(sympy.Min(info.min, found.least), sympy.Max(info.max, found.most))
