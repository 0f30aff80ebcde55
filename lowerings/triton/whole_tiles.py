"""Whether mask_mod chooses every lane of a tile: one comparison of bounds in place of one for each lane.

The ends of a tile's ranges are written as scalar expressions. Indices, values that are the same in the whole tile, and
integer arithmetic on these that cannot wrap around have known ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.codegen.common import CSEVariable

from flex_inductor.mod_ir.ranges import COMPARISONS, CONNECTIVES, Order, Range, Truth, Walk, all_known

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
    lanes: Mapping[str, Range],
) -> str | None:
    """A scalar expression that holds only if `variable` does in every lane of the tile; None if there is none.

    `made` has the operation and the operands of every value, `uniform` says whether one is the same in all lanes.
    """
    if uniform(str(variable)):
        return None
    truth = _InTile(made, uniform, lanes).truth(variable)
    return None if truth is None else truth.always.text


class _InTile:
    def __init__(self, made: Mapping[str, Any], uniform: Callable[[str], bool], lanes: Mapping[str, Range]):
        self.operations, self.uniform, self.lanes = made, uniform, lanes
        self.range = Walk(_ORDER, self.known, self.made, _exact).range

    def truth(self, x: Any) -> Truth | None:
        if self.uniform(str(x)):
            condition = Condition(f"({x})", f"(({x}) == 0)")
            return Truth(condition, condition)
        operation, operands = self.operations.get(str(x), ("", ()))
        if operation in COMPARISONS:
            ranges = all_known(map(self.range, operands))
            return None if ranges is None else COMPARISONS[operation](*ranges)
        connective = operation.removeprefix("logical_").removeprefix("bitwise_").removesuffix("_")
        if connective not in CONNECTIVES or connective == "xor":  # it would write its operands twice
            return None
        truths = [*map(self.truth, operands)]
        return None if None in truths else CONNECTIVES[connective](*truths)

    def known(self, x: Any) -> Range | None:
        if not isinstance(x, int) and not _is_integer(x):
            return None
        same = isinstance(x, int) or self.uniform(str(x))
        return self.lanes.get(str(x)) or (Range(Number(str(x)), Number(str(x))) if same else None)

    def made(self, x: Any) -> tuple[str, Sequence[Any]]:
        operation, operands = self.operations.get(str(x), ("", ()))
        if not _is_integer(x):
            return "", ()
        if operation in ("alone", "to_dtype"):
            wider = x.dtype == torch.int64 and _is_integer(operands[0], INTEGERS[1:4])
            return ("same" if wider or operation == "alone" else ""), operands[:1]
        return _WRITTEN.get(operation, ""), operands


# Operations whose bounds take few instructions, by the name of their rule.
_WRITTEN = {"//": "quotient"} | {name: name for name in ("add", "sub", "minimum", "maximum", "abs")}


def _is_integer(x: Any, dtypes: Sequence[torch.dtype] = INTEGERS) -> bool:
    return isinstance(x, CSEVariable) and x.dtype in dtypes


def _exact(x: CSEVariable, operation: str, operands: Any, ranges: Sequence[Any]) -> Sequence[Any] | None:
    """Nothing wraps around, whatever the lengths. Only numbers of at least 0 are divided."""
    positive = all(isinstance(operand, CSEVariable) and operand.bounds.lower >= 0 for operand in operands)
    if operation in ("same", "quotient") or (positive and operation in ("sub", "minimum", "maximum")):
        return ranges
    return ranges if x.bounds.lower >= -(2**31) and x.bounds.upper < 2**31 else None
