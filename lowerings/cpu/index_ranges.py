"""Whether an index that a lane computes can leave the tensor it looks up: ranges whose ends are made of sizes.

Ranges are those of exact integers. Where sums or products wrap around, a result that fits its dtype is right again.
"""

from __future__ import annotations

from typing import Any

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


def in_range(index: Any, length: Any, sizes: dict[str, Any]) -> bool:
    """Whether 0 <= index < length for every lane; False where that is not evident.

    `sizes` gives the number of batches, heads, queries and keys by the name of the lane.
    """
    found = _range(index, sizes)
    if found is None:
        return False
    known = V.graph.sizevars.statically_known_leq
    within = known(0, found.least) and known(found.most, length - 1)
    return within and (known(length - 1, _LONGEST) or _fits(found, torch.int32))


def may_wrap(node: fx.Node, sizes: dict[str, Any]) -> bool:
    """Whether a sum or product of indices may be too large for its dtype. Lengths that change are taken for at most
    2^30, so that distances with a number added are not."""
    found = _range(node, sizes) if _RULES.get(node.target) in _MODULAR else None
    return found is not None and not _fits(found, node.meta["val"].dtype, 2**30)


def _range(value: Any, sizes: dict[str, Any]) -> Range | None:
    if isinstance(value, int):
        return Range(sympy.Integer(value), sympy.Integer(value))
    if not isinstance(value, fx.Node):
        return None
    if value.op == "placeholder":
        return Range(sympy.S.Zero, sympy.sympify(sizes[value.name]) - 1) if value.name in sizes else None
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
        found = _range(argument, sizes)
        if found is None:
            return None
        own = argument.meta["val"].dtype if isinstance(argument, fx.Node) else dtype
        matters = name not in _MODULAR or own != dtype
        operands.append(_wrapped_or_not(found, own) if matters and not _fits(found, own) else found)
    if name == "same":
        return operands[0]
    if name == "remainder" and not operands[1].least.is_positive:
        return None
    return ARITHMETIC[name](_ORDER, *operands)


def _fits(found: Range, dtype: torch.dtype, longest: int = _LONGEST) -> bool:
    """Whether nothing can have wrapped around, with sizes that are at most `longest`."""
    info = torch.iinfo(dtype)
    least, most = (
        bound_sympy(end, {size: ValueRanges(0, longest) for size in end.free_symbols}) for end in found
    )
    return bool(least.lower >= info.min and most.upper <= info.max)


def _wrapped_or_not(found: Range, dtype: torch.dtype) -> Range:
    """Inductor's index expressions do not wrap around; its loops do."""
    info = torch.iinfo(dtype)
    return Range(sympy.Min(info.min, found.least), sympy.Max(info.max, found.most))
