"""The rules of mod_ir/ranges.py on tensors of many rectangles, with dtypes; and the rules that tensors alone need.

A rule that claims nothing returns None: the result could wrap around in its dtype, or be NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...mod_ir import ranges
from ...mod_ir.ranges import Order, Range
from .intervals import (
    FLOAT_DTYPES,
    INT_DTYPES,
    TENSORS,
    Interval,
    Number,
    Operand,
    as_dtype,
    convert,
    fits,
    integers,
    interval_of,
    promoted,
)

Rule = Callable[..., "Interval | None"]


def _arithmetic(rule: Callable[..., Interval | None]) -> Rule:
    """Promotes the operands. Claims nothing for booleans, nor for infinities, from which arithmetic makes NaN."""

    @functools.wraps(rule)
    def wrapped(*operands: Operand, **kwargs: Any) -> Interval | None:
        dtype = promoted(*operands)
        made = as_dtype(dtype, *operands)
        if made is None or dtype not in INT_DTYPES + FLOAT_DTYPES:
            return None
        if not all(math.isfinite(x.least) and math.isfinite(x.most) for x in made):
            return None
        return rule(dtype, *made, **kwargs)

    return wrapped


def _integer(rule: Callable[..., Interval | None]) -> Rule:
    @functools.wraps(rule)
    def wrapped(dtype: torch.dtype, *operands: Interval, **kwargs: Any) -> Interval | None:
        return rule(dtype, *operands, **kwargs) if dtype in INT_DTYPES else None

    return _arithmetic(wrapped)


def _ruled(
    rule: Callable[..., Range], dtype: torch.dtype, *operands: Interval, alpha: Number = 1
) -> Interval | None:
    """Applies a rule to the exact ends of whole tensors, to see whether anything could wrap, and to rectangles."""
    if alpha != 1:
        return None
    outer = rule(ranges.NUMBERS, *(x.outer for x in operands))
    if dtype in INT_DTYPES and not fits(*outer, dtype):
        return None
    ends = rule(TENSORS, *(x.ends for x in operands))
    return interval_of(ends, dtype, outer, any(x.nan for x in operands))


def _corners(op: Callable, exact: Callable, dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
    """For an operation that is monotonic in each operand while the other is fixed."""

    def rule(order: Order, x: Range, y: Range) -> Range:
        return ranges.corners(order, exact if order is ranges.NUMBERS else op, x, y)

    return _ruled(rule, dtype, a, b)


def _by(rule: Callable[..., Range]) -> Rule:
    return _arithmetic(functools.partial(_ruled, rule))


@_arithmetic
def mul(dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
    if a is b:
        return _ruled(ranges.square, dtype, a)
    return _ruled(ranges.mul, dtype, a, b)


def power(a: Operand, exponent: Operand) -> Interval | None:
    """Only the square: torch computes x ** 2 as x * x, other powers with a library's rounding."""
    if exponent not in (2, 2.0) or not isinstance(a, Interval):
        return None
    return mul(a, a) if promoted(a, exponent) == a.dtype else None


@_arithmetic
def absolute(dtype: torch.dtype, a: Interval) -> Interval | None:
    return a if a.least >= 0 else _ruled(ranges.absolute, dtype, a)


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x >= 0) == (y >= 0) else -1)


def divide(a: Operand, b: Operand, rounding_mode: str | None = None) -> Interval | None:
    if rounding_mode is None:
        return _true_divide(a, b)
    return _whole_divide(a, b, rounding_mode=rounding_mode)


@_integer
def _whole_divide(dtype: torch.dtype, a: Interval, b: Interval, rounding_mode: str) -> Interval | None:
    if b.least <= 0 <= b.most:
        return None
    if rounding_mode == "floor" and b.lo is b.hi and b.least > 0:
        return _ruled(lambda _, x, y: ranges.quotient(x, y.least), dtype, a, b)
    exact = int.__floordiv__ if rounding_mode == "floor" else _truncated
    op = functools.partial(torch.div, rounding_mode=rounding_mode)
    return _corners(op, exact, dtype, a, b)


def _true_divide(a: Operand, b: Operand) -> Interval | None:
    dtype = promoted(a, b)
    dtype = dtype if dtype in FLOAT_DTYPES else torch.get_default_dtype()
    made = as_dtype(dtype, a, b)
    if made is None or not all(math.isfinite(x.least) and math.isfinite(x.most) for x in made):
        return None
    if made[1].least <= 0 <= made[1].most:
        return None
    return _corners(torch.div, lambda x, y: x / y, dtype, *made)


def _same_quotient(a: Interval, b: Interval, rounding_mode: str) -> Tensor:
    ends = [torch.div(x, b.lo, rounding_mode=rounding_mode) for x in (a.lo, a.hi)]
    return (b.lo == b.hi) & (ends[0] == ends[1])


@_integer
def remainder(dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
    """It has the divisor's sign, and increases as long as the quotient stays the same."""
    if b.least <= 0 <= b.most or a.least == torch.iinfo(torch.int64).min:
        return None
    same = _same_quotient(a, b, "floor")
    at_lo, at_hi = torch.remainder(a.lo, b.lo), torch.remainder(a.hi, b.lo)
    if b.least > 0:
        _, most = ranges.remainder(ranges.NUMBERS, a.outer, b.outer)
        least, last = ranges.remainder(TENSORS, a.ends, b.ends)
        lo, hi = torch.where(same, at_lo, least), torch.where(same, at_hi, last)
        if a.least >= 0:
            hi, most = torch.minimum(hi, a.hi), min(most, a.most)
        return integers(lo, hi, dtype, 0, most)
    return integers(torch.where(same, at_lo, b.lo + 1), torch.where(same, at_hi, 0), dtype, b.least + 1, 0)


@_integer
def fmod(dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
    """It has the dividend's sign."""
    if b.least <= 0 <= b.most or min(a.least, b.least) == torch.iinfo(torch.int64).min:
        return None
    same = _same_quotient(a, b, "trunc")
    largest = torch.maximum(b.lo.abs(), b.hi.abs()) - 1
    lo = torch.maximum(-largest, a.lo.clamp(max=0))
    hi = torch.minimum(largest, a.hi.clamp(min=0))
    lo = torch.where(same, torch.fmod(a.lo, b.lo), lo)
    hi = torch.where(same, torch.fmod(a.hi, b.lo), hi)
    return integers(lo, hi, dtype, min(a.least, 0), max(a.most, 0))


@_arithmetic
def sign(dtype: torch.dtype, a: Interval) -> Interval | None:
    outer = Range(-1 if a.least < 0 else 0, 1)
    return interval_of(Range(a.lo.sign(), a.hi.sign()), dtype, outer, a.nan)


def _ordered(rule: Callable[..., Range]) -> Rule:
    """min and max keep infinities and pass NaN on."""

    def ordered(*operands: Operand) -> Interval | None:
        dtype = promoted(*operands)
        made = as_dtype(dtype, *operands)
        if made is None or dtype not in INT_DTYPES + FLOAT_DTYPES:
            return None
        a, b = made
        ends = rule(TENSORS, a.ends, b.ends)
        if dtype in FLOAT_DTYPES:
            return Interval.floating(*ends, a.nan or b.nan)
        return integers(*ends, dtype, *rule(ranges.NUMBERS, a.outer, b.outer))

    return ordered


minimum = _ordered(ranges.minimum)
maximum = _ordered(ranges.maximum)


def clamp(x: Operand, min: Operand | None = None, max: Operand | None = None) -> Interval | None:
    dtype = promoted(*(v for v in (x, min, max) if v is not None))
    made = as_dtype(dtype, x)
    if made is None:
        return None
    result: Interval | None = made[0]
    for limit, rule in ((min, maximum), (max, minimum)):
        if limit is not None and result is not None:
            result = rule(result, limit)
    return result


def _rounding(op: Callable) -> Rule:
    def rule(a: Operand) -> Interval | None:
        if not isinstance(a, Interval) or a.dtype not in INT_DTYPES + FLOAT_DTYPES:
            return None
        return a if a.dtype in INT_DTYPES else Interval.floating(op(a.lo), op(a.hi), a.nan)

    return rule


def square_root(a: Operand) -> Interval | None:
    if not isinstance(a, Interval) or a.dtype not in FLOAT_DTYPES or not (a.least >= 0 and a.most < math.inf):
        return None
    return Interval.floating(a.lo.sqrt(), a.hi.sqrt(), a.nan)


def where(condition: Operand, a: Operand, b: Operand) -> Interval | None:
    dtype = promoted(a, b) if any(isinstance(x, Interval) for x in (a, b)) else None
    if dtype is None or not isinstance(condition, Interval) or condition.dtype != torch.bool:
        return None
    made = as_dtype(dtype, a, b)
    if made is None:
        return None
    x, y = made
    only_x, only_y = condition.lo, ~condition.hi
    lo = torch.where(only_x, x.lo, torch.where(only_y, y.lo, torch.minimum(x.lo, y.lo)))
    hi = torch.where(only_x, x.hi, torch.where(only_y, y.hi, torch.maximum(x.hi, y.hi)))
    return Interval(lo, hi, dtype, min(x.least, y.least), max(x.most, y.most), x.nan or y.nan)


def _comparison(name: str) -> Rule:
    """A comparison with NaN is false, but for `!=`."""
    compared, of_nan = ranges.COMPARISONS[name], name == "ne"

    def rule(*operands: Operand) -> Interval | None:
        dtype = promoted(*operands)
        made = as_dtype(torch.int64 if dtype == torch.bool else dtype, *operands)
        if made is None:
            return None
        always, possible = compared(*(x.ends for x in made))
        if any(x.nan for x in made):
            always, possible = (
                (always, torch.ones_like(possible)) if of_nan else (torch.zeros_like(always), possible)
            )
        return Interval.boolean(always, possible)

    return rule


def _connective(name: str) -> Rule:
    connected = ranges.CONNECTIVES[name]

    def rule(*operands: Operand) -> Interval | None:
        made = as_dtype(torch.bool, *operands)
        return None if made is None else Interval.boolean(*connected(*(ranges.Truth(*x.ends) for x in made)))

    return rule


def _bitwise(op: Callable, kind: str) -> Rule:
    """The result itself if both operands are single values, else bounds from the bits that can be set."""

    on_bools = _connective(kind)

    @_integer
    def on_integers(dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
        if a.least < 0 or b.least < 0:
            return None
        ones = (1 << max(int(a.most), int(b.most)).bit_length()) - 1
        lo = torch.maximum(a.lo, b.lo) if kind == "or" else torch.zeros_like(a.lo + b.lo)
        hi = torch.minimum(a.hi, b.hi) if kind == "and" else torch.full_like(a.hi + b.hi, ones)
        single = (a.lo == a.hi) & (b.lo == b.hi)
        value = op(a.lo, b.lo)
        most = min(a.most, b.most) if kind == "and" else ones
        return integers(torch.where(single, value, lo), torch.where(single, value, hi), dtype, 0, most)

    def rule(a: Operand, b: Operand) -> Interval | None:
        if promoted(a, b) == torch.bool:
            return on_bools(a, b)
        return on_integers(a, b)

    return rule


def bitwise_not(a: Operand) -> Interval | None:
    if not isinstance(a, Interval) or a.dtype == torch.bool:
        return _connective("not")(a)
    if a.dtype == torch.uint8:
        return Interval(255 - a.hi, 255 - a.lo, a.dtype, 255 - a.most, 255 - a.least)
    return Interval(~a.hi, ~a.lo, a.dtype, -1 - a.most, -1 - a.least) if a.dtype in INT_DTYPES else None


def _shift(op: Callable, exact: Callable) -> Rule:
    """Claims nothing for shifts by the dtype's width or more, or by a negative number, which torch defines."""

    @_integer
    def rule(dtype: torch.dtype, a: Interval, b: Interval) -> Interval | None:
        if b.least < 0 or b.most >= torch.iinfo(dtype).bits:
            return None
        return _corners(op, exact, dtype, a, b)

    return rule


def identity(a: Operand, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Interval | None:
    if not isinstance(a, Interval):
        return None
    return convert(a, dtype or a.dtype)


aten = torch.ops.aten

RULES: dict[Any, Rule] = {
    aten.add: _by(ranges.add),
    aten.sub: _by(ranges.sub),  # not a + (-b): -b alone may wrap where a - b does not
    aten.rsub: _by(lambda order, a, b: ranges.sub(order, b, a)),
    aten.mul: mul,
    aten.pow: power,
    aten.square: lambda a: mul(a, a),
    aten.neg: _by(ranges.neg),
    aten.abs: absolute,
    aten.div: divide,
    aten.floor_divide: functools.partial(divide, rounding_mode="floor"),
    aten.remainder: remainder,
    aten.fmod: fmod,
    aten.sign: sign,
    aten.minimum: minimum,
    aten.maximum: maximum,
    aten.clamp: clamp,
    aten.clamp_min: lambda a, limit: clamp(a, min=limit),
    aten.clamp_max: lambda a, limit: clamp(a, max=limit),
    aten.floor: _rounding(torch.floor),
    aten.ceil: _rounding(torch.ceil),
    aten.trunc: _rounding(torch.trunc),
    aten.round: _rounding(torch.round),
    aten.sqrt: square_root,
    aten.relu: lambda a: maximum(a, 0),
    aten.where: where,
    **{getattr(aten, name): _comparison(name) for name in ranges.COMPARISONS},
    **{getattr(aten, f"logical_{name}"): _connective(name) for name in ranges.CONNECTIVES},
    aten.bitwise_and: _bitwise(torch.bitwise_and, "and"),
    aten.bitwise_or: _bitwise(torch.bitwise_or, "or"),
    aten.bitwise_xor: _bitwise(torch.bitwise_xor, "xor"),
    aten.bitwise_not: bitwise_not,
    aten.bitwise_left_shift: _shift(torch.bitwise_left_shift, int.__lshift__),
    aten.bitwise_right_shift: _shift(torch.bitwise_right_shift, int.__rshift__),
    aten._to_copy: identity,
    aten.clone: identity,
    aten.alias: identity,
    aten.detach: identity,
    aten.lift_fresh_copy: identity,
}
RULES |= {
    aten.__and__: RULES[aten.bitwise_and],
    aten.__or__: RULES[aten.bitwise_or],
    aten.__xor__: RULES[aten.bitwise_xor],
    aten.__lshift__: RULES[aten.bitwise_left_shift],
    aten.__rshift__: RULES[aten.bitwise_right_shift],
}


def bound(op: Any, dtype: torch.dtype, device: torch.device, /, *args: Any, **kwargs: Any) -> Interval:
    """Bounds of one step. No rule, or a rule that claims nothing, gives every value of the dtype."""
    rule = RULES.get(getattr(op, "overloadpacket", op))
    known = all(x is None or isinstance(x, (Interval, int, float)) for x in args)
    claimed = rule(*args, **kwargs) if rule is not None and known else None
    return claimed if claimed is not None and claimed.dtype == dtype else Interval.unknown(dtype, device)
