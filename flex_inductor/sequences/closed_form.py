"""Masks that are a window: what a query sees is a range of keys around its own position.

Read off the steps of a traced mask_mod: comparisons of sums of q, kv and numbers, joined by `and`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks.trace import INDEX_NAMES, MaskProgram, Ref

aten = torch.ops.aten


class Window(NamedTuple):
    """A query at position q sees the keys from q - left to q + right."""

    left: float = math.inf
    right: float = math.inf

    def __and__(self, other: Window) -> Window:
        return Window(min(self.left, other.left), min(self.right, other.right))

    def mask_mod(self, shift: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The window as a mask, whose queries stand `shift` further on than they are counted."""

        def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            to_the_left = kv_idx >= q_idx + int(shift - self.left) if self.left < math.inf else None
            to_the_right = kv_idx <= q_idx + int(shift + self.right) if self.right < math.inf else None
            if to_the_left is None:
                return q_idx == q_idx if to_the_right is None else to_the_right
            return to_the_left if to_the_right is None else to_the_left & to_the_right

        return window


class _Sum(NamedTuple):
    """q * query + kv * key + number."""

    q: int
    kv: int
    number: int

    def times(self, factor: int) -> _Sum:
        return _Sum(self.q * factor, self.kv * factor, self.number * factor)

    def plus(self, other: _Sum, times: int = 1) -> _Sum:
        return _Sum(*(a + times * b for a, b in zip(self, other, strict=True)))


_OPERANDS = {"add": 2, "sub": 2, "neg": 1}
_MOST = 1 << 62  # sums beyond it may wrap around

_COMPARED = {  # the sign by which left - right is at least 0, and what to take away where they must differ
    "ge": (1, 0),
    "gt": (1, 1),
    "le": (-1, 0),
    "lt": (-1, 1),
}


def window_of(program: MaskProgram) -> Window | None:
    """The window that the mask is, or None."""
    return _window(program, Ref(program.output))


def _window(program: MaskProgram, at: object) -> Window | None:
    if not isinstance(at, Ref):
        return Window() if at is True else None  # of `causal & True`
    step = program.steps[at.step]
    name = _name(step.target)
    if name in ("bitwise_and", "logical_and"):
        left, right = (_window(program, argument) for argument in step.args)
        return None if left is None or right is None else left & right
    if name not in _COMPARED or step.kwargs:
        return None
    sign, differ = _COMPARED[name]
    left, right = step.args
    if isinstance(left, Ref) and (inner := _absolute(program, left)) and sign < 0:
        bound = _sum(program, right)
        if bound is None or bound[:2] != (0, 0):
            return None
        number = _Sum(0, 0, bound.number - differ)
        sides = [_at_least_zero(number.plus(inner, times)) for times in (1, -1)]
        return None if None in sides else sides[0] & sides[1]
    sums = [_sum(program, side) for side in (left, right)]
    if None in sums:
        return None
    return _at_least_zero(sums[0].plus(sums[1], -1).times(sign).plus(_Sum(0, 0, -differ)))


def _at_least_zero(found: _Sum) -> Window | None:
    if (found.q, found.kv) == (1, -1):
        return Window(right=found.number)
    if (found.q, found.kv) == (-1, 1):
        return Window(left=found.number)
    return None


def _absolute(program: MaskProgram, at: Ref) -> _Sum | None:
    step = program.steps[at.step]
    return _sum(program, step.args[0]) if _name(step.target) == "abs" else None


def _sum(program: MaskProgram, value: object) -> _Sum | None:
    if isinstance(value, bool) or not isinstance(value, (int, Ref)):
        return None
    if isinstance(value, int):
        return _Sum(0, 0, value)
    if value.step < len(INDEX_NAMES):
        found = {"q": _Sum(1, 0, 0), "kv": _Sum(0, 1, 0)}
        return found.get(INDEX_NAMES[value.step])
    step = program.steps[value.step]
    name = _name(step.target)
    if step.dtype not in (torch.int32, torch.int64) or step.kwargs or len(step.args) != _OPERANDS.get(name):
        return None  # a third argument is a factor
    sums = [_sum(program, argument) for argument in step.args]
    if None in sums:
        return None
    total = sums[0].times(-1) if name == "neg" else sums[0].plus(sums[1], 1 if name == "add" else -1)
    return total if abs(total.q) <= 1 and abs(total.kv) <= 1 and abs(total.number) <= _MOST else None


def _name(target: object) -> str:
    """Of an aten op, whatever its overload."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""
