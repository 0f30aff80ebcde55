"""Whether mask_mod chooses every lane of a tile: one comparison of bounds in place of one for each lane.

The ends of a tile's ranges are written as scalar expressions. Ranges are known of indices, of what is the same in the
whole tile, and of integer arithmetic on these that cannot wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.codegen.common import CSEVariable

from flex_inductor.mod_ir.ranges import ARITHMETIC, COMPARISONS, CONNECTIVES, Order, Range, Truth, quotient

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Number:
    """The text of a scalar expression."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> Number:
        return Number(f"({self} + {other})")

    def __sub__(self, other: Any) -> Number:
        return Number(f"({self} - {other})")

    def __floordiv__(self, other: Any) -> Number:
        return Number(f"({self} // {other})")

    def __neg__(self) -> Number:
        return Number(f"-({self})")

    def __lt__(self, other: Any) -> Condition:
        return Condition(f"({self} < {other})", f"({self} >= {other})")

    def __le__(self, other: Any) -> Condition:
        return Condition(f"({self} <= {other})", f"({self} > {other})")

    def __ge__(self, other: Any) -> Condition:
        return ~(self < other)

    def __eq__(self, other: Any) -> Condition:  # type: ignore[override]
        return Condition(f"({self} == {other})", f"({self} != {other})")


@dataclass(frozen=True, eq=False)
class Condition:
    """The texts of a scalar condition and of its opposite."""

    text: str
    opposite: str

    def __invert__(self) -> Condition:
        return Condition(self.opposite, self.text)

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"({self.text} & {other.text})", f"({self.opposite} | {other.opposite})")

    def __or__(self, other: Condition) -> Condition:
        return ~(~self & ~other)


_ORDER = Order(
    lambda a, b: Number(f"tl.minimum({a}, {b})"),
    lambda a, b: Number(f"tl.maximum({a}, {b})"),
)


def _lane(first: str, last: str) -> Range:
    return Range(Number(first), Number(last))


LANES = {"q_idx": _lane("start_m", "last_m"), "kv_idx": _lane("start_n", "last_n")}
MAPPED_LANES = {
    "q_idx": _lane("(start_m + shift_m)", "(last_m + shift_m)"),
    "kv_idx": _lane("(start_n + shift_n)", "(last_n + shift_n)"),
}


def whole(
    variable: CSEVariable,
    made: Mapping[str, Any],
    uniform: Callable[[str], bool],
    lanes: Mapping[str, Range] = LANES,
) -> str | None:
    """A scalar expression that holds only if `variable` does in every lane of the tile; None if there is none.

    `made` has the operation and the operands of every value, `uniform` says whether one is the same in all lanes.
    """
    if uniform(str(variable)):
        return None
    truth = _Bounds(made, uniform, lanes).truth(variable)
    return None if truth is None else truth.always.text


class _Bounds:
    def __init__(self, made: Mapping[str, Any], uniform: Callable[[str], bool], lanes: Mapping[str, Range]):
        self.made, self.uniform, self.lanes = made, uniform, lanes

    def truth(self, x: Any) -> Truth | None:
        if self.uniform(str(x)):
            condition = Condition(f"({x})", f"(({x}) == 0)")
            return Truth(condition, condition)
        operation, operands = self.made.get(str(x), ("", ()))
        if operation in COMPARISONS:
            ranges = [self.range(operand) for operand in operands]
            return None if None in ranges else COMPARISONS[operation](*ranges)
        connective = operation.removeprefix("logical_").removeprefix("bitwise_").removesuffix("_")
        if connective not in CONNECTIVES or connective == "xor":  # which would write its operands twice
            return None
        truths = [self.truth(operand) for operand in operands]
        return None if None in truths else CONNECTIVES[connective](*truths)

    def range(self, x: Any) -> Range | None:
        if not isinstance(x, CSEVariable) or x.dtype not in INTEGERS:
            return None
        if str(x) in self.lanes:
            return self.lanes[str(x)]
        if self.uniform(str(x)):
            return Range(Number(str(x)), Number(str(x)))
        operation, operands = self.made.get(str(x), ("", ()))
        if operation == "//":  # of what is not negative by a positive number
            divided, by = self.range(operands[0]), operands[1]
            return divided and quotient(divided, by)
        if operation in ("alone", "to_dtype"):
            source = operands[0]
            wider = isinstance(source, CSEVariable) and source.dtype in INTEGERS[1:4]
            return self.range(source) if operation == "alone" or (wider and x.dtype == torch.int64) else None
        if operation not in _WRITTEN or not _exact(x, operation, operands):
            return None
        ranges = [self.range(operand) for operand in operands]
        return None if None in ranges else ARITHMETIC[operation](_ORDER, *ranges)


_WRITTEN = ("add", "sub", "minimum", "maximum", "abs")  # whose bounds take few instructions


def _exact(x: CSEVariable, operation: str, operands: Any) -> bool:
    """Whether nothing wraps around, whatever the lengths."""
    positive = all(isinstance(operand, CSEVariable) and operand.bounds.lower >= 0 for operand in operands)
    if positive and operation in ("sub", "minimum", "maximum"):
        return True
    return x.bounds.lower >= -(2**31) and x.bounds.upper < 2**31
