"""Whether an index that a lane computes can leave the tensor it looks up: ranges whose ends are made of sizes.

Ranges are those of exact integers. Where sums or products wrap around, a result that fits its dtype is right again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from flex_inductor.mod_ir.ranges import ARITHMETIC, Order, Range

aten = torch.ops.aten

_ORDER = Order(sympy.Min, sympy.Max)
_INTEGERS = (torch.int32, torch.int64)
_LONGEST = 2**31 - 1  # indices have 32 bits
_RULES = {
    aten._to_copy.default: "same",
    aten.abs.default: "abs",
    aten.add.Tensor: "add",
    aten.clamp.default: "clamp",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.mul.Tensor: "mul",
    aten.neg.default: "neg",
    aten.remainder.Scalar: "remainder",
    aten.sub.Tensor: "sub",
}
# All others need operands that have not wrapped around.
_MODULAR = ("add", "mul", "neg", "sub")


class NoMore(NamedTuple):
    """A condition: that one number is no more than another."""

    less: Any
    more: Any


def needed(index: Any, length: Any, bounds: dict[str, Range]) -> set[NoMore] | None:
    """What must hold for 0 <= index < length in every lane, beside what is evident; None where nothing is known.

    `bounds` are those of b, h, q_idx and kv_idx, by name.
    """
    found = _range(index, bounds)
    if found is None:
        return None
    conditions = {NoMore(sympy.S.Zero, found.least), NoMore(found.most, sympy.sympify(length) - 1)}
    if not _fits(found, torch.int32):
        conditions.add(NoMore(sympy.sympify(length) - 1, sympy.Integer(_LONGEST)))
    return {pair for pair in conditions if not V.graph.sizevars.statically_known_leq(*pair)}


def may_wrap(node: fx.Node, bounds: dict[str, Range]) -> bool:
    """Whether a sum or product of indices may be too large for its dtype. Lengths that change are taken for at most
    2^30, so that distances with a number added are not."""
    found = _range(node, bounds) if _RULES.get(node.target) in _MODULAR else None
    return found is not None and not _fits(found, node.meta["val"].dtype, 2**30)


def _range(value: Any, bounds: dict[str, Range]) -> Range | None:
    if isinstance(value, int):
        return Range(sympy.Integer(value), sympy.Integer(value))
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        return bounds.get(value.name)
    if "val" not in value.meta or (dtype := value.meta["val"].dtype) not in _INTEGERS:
        return None
    name = _RULES.get(value.target)
    if name is None or (value.kwargs and name != "same"):
        return None
    operands: list[Range | None] = []
    for argument in value.args:
        if argument is None:  # a limit of clamp
            operands.append(None)
            continue
        found = _range(argument, bounds)
        if found is None:
            return None
        own = argument.meta["val"].dtype if isinstance(argument, fx.Node) else dtype
        matters = name not in _MODULAR or own != dtype
        operands.append(_wrapped_or_not(found, own) if matters and not _fits(found, own) else found)
    if name == "same":
        return operands[0]
    if name == "remainder" and not operands[1].least.is_positive:
        return None
    return Range(*map(sympy.sympify, ARITHMETIC[name](_ORDER, *operands)))


def _fits(found: Range, dtype: torch.dtype, longest: int = _LONGEST) -> bool:
    """Whether nothing can have wrapped around, with sizes that are at most `longest`."""
    info = torch.iinfo(dtype)
    least, most = (
        bound_sympy(
            end, {s: ValueRanges(0 if s.is_nonnegative else -longest, longest) for s in end.free_symbols}
        )
        for end in found
    )
    return bool(least.lower >= info.min and most.upper <= info.max)


def _wrapped_or_not(found: Range, dtype: torch.dtype) -> Range:
    """Inductor's index expressions do not wrap around; its loops do."""
    info = torch.iinfo(dtype)
    return Range(sympy.Min(info.min, found.least), sympy.Max(info.max, found.most))
