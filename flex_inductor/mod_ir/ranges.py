"""Bounds of an operation's result from bounds of its operands: one rule for each operation.

A range has two ends. An end is a number, a tensor (one range in each element), an expression of sizes, or the text of
an expression in another language: anything with + - * and comparisons. `Order` has the lesser and the greater of two.

Rules hold for integers of any size. Whoever applies one checks that nothing wraps around, or that it does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

Fact = TypeVar("Fact")


class Range(NamedTuple):
    least: Any
    most: Any


class Truth(NamedTuple):
    """A condition on values that are known by their ranges only."""

    always: Any  # whether it holds whatever the values
    possible: Any  # whether it may hold


class Order(NamedTuple):
    """The lesser and the greater of two ends."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]


NUMBERS = Order(min, max)


def all_known(facts: Iterable[Fact | None]) -> list[Fact] | None:
    """The facts, or None if one of them is not known."""
    found = []
    for fact in facts:
        if fact is None:
            return None
        found.append(fact)
    return found


def operation(target: Any) -> str:
    """The name of an aten op without its overload, the key of rules."""
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name.removeprefix("aten::")


def add(_: Order, x: Range, y: Range) -> Range:
    return Range(x.least + y.least, x.most + y.most)


def sub(_: Order, x: Range, y: Range) -> Range:
    return Range(x.least - y.most, x.most - y.least)


def neg(_: Order, x: Range) -> Range:
    return Range(-x.most, -x.least)


def mul(order: Order, x: Range, y: Range) -> Range:
    return corners(order, lambda a, b: a * b, x, y)


def square(order: Order, x: Range) -> Range:
    size = absolute(order, x)
    return Range(size.least * size.least, size.most * size.most)


def absolute(order: Order, x: Range) -> Range:
    least = order.maximum(order.maximum(x.least, -x.most), 0)
    return Range(least, order.maximum(-x.least, x.most))


def minimum(order: Order, x: Range, y: Range) -> Range:
    return Range(*map(order.minimum, x, y))


def maximum(order: Order, x: Range, y: Range) -> Range:
    return Range(*map(order.maximum, x, y))


def clamp(order: Order, x: Range, least: Range | None = None, most: Range | None = None) -> Range:
    x = x if least is None else maximum(order, x, least)
    return x if most is None else minimum(order, x, most)


def quotient(x: Range, by: Any) -> Range:
    """Rounded down, by one positive number."""
    return Range(x.least // by, x.most // by)


def remainder(_: Order, x: Range, y: Range) -> Range:
    """For a division by a positive number, rounded down."""
    return Range(0, y.most - 1)


def corners(order: Order, operation: Callable[[Any, Any], Any], x: Range, y: Range) -> Range:
    """For an operation that is monotonic in each operand while the other is fixed."""
    found = [operation(a, b) for a in _distinct(x) for b in _distinct(y)]
    return Range(functools.reduce(order.minimum, found), functools.reduce(order.maximum, found))


def _distinct(x: Range) -> tuple[Any, ...]:
    return (x.least,) if x.least is x.most else x


def less(x: Range, y: Range) -> Truth:
    return Truth(x.most < y.least, x.least < y.most)


def greater_equal(x: Range, y: Range) -> Truth:
    return Truth(x.least >= y.most, x.most >= y.least)


def equal(x: Range, y: Range) -> Truth:
    overlap = (x.most >= y.least) & (x.least <= y.most)
    return Truth((x.least == y.most) & (x.most == y.least), overlap)


def negation(x: Truth) -> Truth:
    return Truth(~x.possible, ~x.always)


def conjunction(x: Truth, y: Truth) -> Truth:
    return Truth(x.always & y.always, x.possible & y.possible)


def disjunction(x: Truth, y: Truth) -> Truth:
    return Truth(x.always | y.always, x.possible | y.possible)


def difference(x: Truth, y: Truth) -> Truth:
    """Whether one holds and not the other."""
    return disjunction(conjunction(x, negation(y)), conjunction(negation(x), y))


# By the name that aten and Inductor have for an operation; "same" and "quotient" are ours.
ARITHMETIC: dict[str, Callable[..., Range]] = {
    "add": add,
    "sub": sub,
    "neg": neg,
    "mul": mul,
    "abs": absolute,
    "minimum": minimum,
    "maximum": maximum,
    "clamp": clamp,
    "remainder": remainder,
    "quotient": lambda _, x, y: quotient(x, y.most),
    "same": lambda _, x: x,
}
COMPARISONS: dict[str, Callable[[Range, Range], Truth]] = {
    "ge": greater_equal,
    "le": lambda x, y: greater_equal(y, x),
    "lt": less,
    "gt": lambda x, y: less(y, x),
    "eq": equal,
    "ne": lambda x, y: negation(equal(x, y)),
}
CONNECTIVES: dict[str, Callable[..., Truth]] = {
    "not": negation,
    "and": conjunction,
    "or": disjunction,
    "xor": difference,
}


class Walk(NamedTuple):
    """From a value back to those whose ranges are known, and forward by the rules.

    Values may be nodes of a graph, variables of a kernel, or anything else that three functions describe.
    """

    order: Order
    known: Callable[[Any], Range | None]  # the range of a value where a walk begins
    made: Callable[[Any], tuple[str, Sequence[Any]]]  # the operation that gives a value, and its operands
    exact: Callable[..., Sequence[Any] | None]  # the operands' ranges to use; None if the result may wrap

    def range(self, value: Any) -> Range | None:
        found = self.known(value)
        if found is not None:
            return found
        name, operands = self.made(value)
        if name not in ARITHMETIC:
            return None
        ranges = [None if operand is None else self.range(operand) for operand in operands]
        if any(r is None and operand is not None for r, operand in zip(ranges, operands, strict=True)):
            return None
        counting = self.exact(value, name, operands, ranges)
        return None if counting is None else ARITHMETIC[name](self.order, *counting)
