"""Whether mask_mod chooses every lane of a tile, by the bounds of what it compares: one comparison for all.

Bounds are kept where they are certain: of indices, of what is the same for the whole tile, and of what integer
arithmetic that cannot wrap around makes of them. Of anything else nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._inductor.codegen.common import CSEVariable

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Ends(NamedTuple):
    """Scalar expressions for the least and the largest value in a tile."""

    least: str
    most: str


LANES = {"q_idx": Ends("start_m", "last_m"), "kv_idx": Ends("start_n", "last_n")}
MAPPED_LANES = {
    "q_idx": Ends("(start_m + shift_m)", "(last_m + shift_m)"),
    "kv_idx": Ends("(start_n + shift_n)", "(last_n + shift_n)"),
}


class Sure(NamedTuple):
    """Scalar expressions that hold only if a condition does in every lane of a tile, or in none."""

    always: str
    never: str


def whole(
    variable: CSEVariable,
    made: Mapping[str, Any],
    uniform: Callable[[str], bool],
    lanes: Mapping[str, Ends] = LANES,
) -> str | None:
    """A scalar expression that holds only if `variable` does in every lane of the tile; None if there is none.

    `made` has the operation and the operands of every value, `uniform` says whether one is the same in all lanes.
    """
    if uniform(str(variable)):
        return None
    sure = _Bounds(made, uniform, lanes).sure(variable)
    return None if sure is None else sure.always


class _Bounds:
    def __init__(self, made: Mapping[str, Any], uniform: Callable[[str], bool], lanes: Mapping[str, Ends]):
        self.made, self.uniform, self.lanes = made, uniform, lanes

    def sure(self, x: Any) -> Sure | None:
        if self.uniform(str(x)):
            return Sure(f"({x})", f"(({x}) == 0)")
        operation, operands = self.made.get(str(x), ("", ()))
        if operation in _COMPARISONS:
            ends = [self.ends(operand) for operand in operands]
            return None if None in ends else _COMPARISONS[operation](*ends)
        if operation not in _CONNECTIVES:
            return None
        sures = [self.sure(operand) for operand in operands]
        return None if None in sures else _CONNECTIVES[operation](*sures)

    def ends(self, x: Any) -> Ends | None:
        if not isinstance(x, CSEVariable) or x.dtype not in INTEGERS:
            return None
        if str(x) in self.lanes:
            return self.lanes[str(x)]
        if self.uniform(str(x)):
            return Ends(str(x), str(x))
        operation, operands = self.made.get(str(x), ("", ()))
        if operation == "//":  # of what is not negative by a positive number
            divided, by = self.ends(operands[0]), operands[1]
            return divided and Ends(*(f"({end} // {by})" for end in divided))
        if operation in ("alone", "to_dtype"):
            source = operands[0]
            wider = isinstance(source, CSEVariable) and source.dtype in INTEGERS[1:4]
            return self.ends(source) if operation == "alone" or (wider and x.dtype == torch.int64) else None
        if operation not in _ARITHMETIC or not _exact(x, operation, operands):
            return None
        ends = [self.ends(operand) for operand in operands]
        return None if None in ends else _ARITHMETIC[operation](*ends)


def _exact(x: CSEVariable, operation: str, operands: Any) -> bool:
    """Whether nothing wraps around, whatever the lengths."""
    positive = all(isinstance(operand, CSEVariable) and operand.bounds.lower >= 0 for operand in operands)
    if positive and operation in ("sub", "minimum", "maximum"):
        return True
    return x.bounds.lower >= -(2**31) and x.bounds.upper < 2**31


def _ge(x: Ends, y: Ends) -> Sure:
    return Sure(f"({x.least} >= {y.most})", f"({x.most} < {y.least})")


def _eq(x: Ends, y: Ends) -> Sure:
    apart = f"(({x.most} < {y.least}) | ({x.least} > {y.most}))"
    return Sure(f"(({x.least} == {y.most}) & ({x.most} == {y.least}))", apart)


def _not(x: Sure) -> Sure:
    return Sure(x.never, x.always)


def _and(x: Sure, y: Sure) -> Sure:
    return Sure(f"({x.always} & {y.always})", f"({x.never} | {y.never})")


def _or(x: Sure, y: Sure) -> Sure:
    return _not(_and(_not(x), _not(y)))


_COMPARISONS: dict[str, Callable[[Ends, Ends], Sure]] = {
    "ge": _ge,
    "lt": lambda x, y: _not(_ge(x, y)),
    "le": lambda x, y: _ge(y, x),
    "gt": lambda x, y: _not(_ge(y, x)),
    "eq": _eq,
    "ne": lambda x, y: _not(_eq(x, y)),
}

_CONNECTIVES: dict[str, Callable[..., Sure]] = {
    **dict.fromkeys(("logical_not", "bitwise_not"), _not),
    **dict.fromkeys(("logical_and", "bitwise_and", "and_"), _and),
    **dict.fromkeys(("logical_or", "bitwise_or", "or_"), _or),
}

_ARITHMETIC: dict[str, Callable[..., Ends]] = {
    "add": lambda x, y: Ends(f"({x.least} + {y.least})", f"({x.most} + {y.most})"),
    "sub": lambda x, y: Ends(f"({x.least} - {y.most})", f"({x.most} - {y.least})"),
    "minimum": lambda x, y: Ends(f"tl.minimum({x.least}, {y.least})", f"tl.minimum({x.most}, {y.most})"),
    "maximum": lambda x, y: Ends(f"tl.maximum({x.least}, {y.least})", f"tl.maximum({x.most}, {y.most})"),
    "abs": lambda x: Ends(
        f"tl.maximum(tl.maximum({x.least}, -({x.most})), 0)",
        f"tl.maximum(tl.abs({x.least}), tl.abs({x.most}))",
    ),
}
