"""Masks that are a window, as op/window.py has it.

Read off the steps of a traced mask_mod: comparisons of sums of q, kv and numbers, and of chunks, joined by `and`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..mod_ir.replay import Recording, is_alone, keep, replayed
from ..windows import ALL, Window
from .trace import INDEX_NAMES, MaskProgram, Ref, Step, name_of, trace_mask

_SEEN = "seen"  # what is kept of a trace


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
MOST = 1 << 30  # sums beyond it may wrap around, as indices are int32

_COMPARED = {  # the sign by which left - right is at least 0, and what to take away where they must differ
    "ge": (1, 0),
    "gt": (1, 1),
    "le": (-1, 0),
    "lt": (-1, 1),
}


class Seen(NamedTuple):
    window: Window | None  # that the mask is
    reads_heads: bool
    program: MaskProgram | None  # where the mask was traced

    @property
    def is_plain_window(self) -> bool:
        """Whether its tiles follow from their positions, to the last one."""
        return self.window is not None and self.window.has_no_gaps


def seen(mask_mod: Callable, like: Tensor) -> Seen:
    """What is known of a mask without analysis. `like` is on the indices' device.

    The function runs each time; what it calls was traced in an earlier run (mod_ir/replay.py).
    """
    known = replayed(mask_mod, INDEX_NAMES, like)
    if known is not None:
        return known.traces.graphs[_SEEN]
    runs: list[Recording] = []

    @functools.wraps(mask_mod)
    def recorded(*lanes: Tensor) -> Any:
        with Recording(lanes) as run:
            result = mask_mod(*lanes)
        run.ended(result)
        runs.append(run)
        return result

    recorded.__name__ = name_of(mask_mod)
    program = trace_mask(recorded, like.device)
    found = Seen(window_of(program), "h" in program.reads, None)
    traces = keep(runs[0], INDEX_NAMES, like) if len(runs) == 1 and is_alone(like) else None
    if traces is not None:
        traces.graphs[_SEEN] = found
    return found._replace(program=program)


def window_of(program: MaskProgram) -> Window | None:
    """The window that the mask is, or None."""
    return _window(program, Ref(program.output))


def limits_of(lane: fx.Graph) -> Window:
    """A window outside of which the mask of this lane graph lets nothing through."""
    steps = [Step(name, (), {}, torch.int64, (), frozenset()) for name in INDEX_NAMES]
    found: dict[fx.Node, Ref] = {node: Ref(i) for i, node in enumerate([*lane.nodes][: len(INDEX_NAMES)])}
    for node in [*lane.nodes][len(INDEX_NAMES) : -1]:
        found[node] = Ref(len(steps))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
        value = node.meta.get("val")
        steps.append(Step(node.target, args, kwargs, getattr(value, "dtype", None), (), frozenset()))
    (output,) = lane.output_node().args[0]
    program = MaskProgram(steps, found[output].step, "", torch.device("cpu"))
    return _window(program, Ref(program.output), at_most=True) or ALL


def _window(program: MaskProgram, at: object, at_most: bool = False) -> Window | None:
    """With `at_most`, of conditions joined by `and` those that are windows are enough."""
    if not isinstance(at, Ref):
        return Window() if at is True else None  # of `causal & True`
    step = program.steps[at.step]
    name = _name(step.target)
    if name in ("bitwise_and", "logical_and"):
        left, right = (_window(program, argument, at_most) for argument in step.args)
        if at_most and None in (left, right):
            return left or right
        return None if left is None or right is None else left.within(right)
    if name in ("bitwise_or", "logical_or") and not at_most:
        return _with_prefix(program, *step.args)
    if name == "eq":
        return _same_chunk(program, *step.args)
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
        return None if None in sides else sides[0].within(sides[1])
    compared = _compared(program, step)
    return None if compared is None else _at_least_zero(compared)


def _compared(program: MaskProgram, step: Step) -> _Sum | None:
    """What is at least 0 where the comparison holds."""
    if _name(step.target) not in _COMPARED:
        return None
    sign, differ = _COMPARED[_name(step.target)]
    left, right = (_sum(program, side) for side in step.args)
    if left is None or right is None:
        return None
    return left.plus(right, -1).times(sign).plus(_Sum(0, 0, -differ))


def _with_prefix(program: MaskProgram, *sides: object) -> Window | None:
    """Of a window or the first keys, in either order."""
    for window, other in ((_window(program, sides[0]), sides[1]), (_window(program, sides[1]), sides[0])):
        if window is not None and window._replace(right=ALL.right) == ALL:
            first = _first_keys(program, other)
            return None if first is None else window._replace(prefix=max(first, 0))
    return None


def _first_keys(program: MaskProgram, at: object) -> int | None:
    """How many keys a comparison with their index lets through."""
    step = program.steps[at.step] if isinstance(at, Ref) else None
    compared = None if step is None or step.kwargs else _compared(program, step)
    return compared.number + 1 if compared is not None and compared[:2] == (0, -1) else None


def _same_chunk(program: MaskProgram, *sides: object) -> Window | None:
    found = [_quotient(program, side) for side in sides]
    sizes = {index: size for index, size in found if size}
    return Window(chunk=sizes["q"]) if len(sizes) == 2 and sizes["q"] == sizes["kv"] else None


def _quotient(program: MaskProgram, at: object) -> tuple[str, int]:
    """Of q // size or kv // size the index and the size; 0 for what is neither."""
    step = program.steps[at.step] if isinstance(at, Ref) else None
    if step is None or _name(step.target) != "floor_divide":
        return "", 0
    index, size = step.args
    names = {Ref(i): name for i, name in enumerate(INDEX_NAMES) if name in ("q", "kv")}
    return (names[index], size) if index in names and type(size) is int and size > 0 else ("", 0)


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
    return total if abs(total.q) <= 1 and abs(total.kv) <= 1 and abs(total.number) <= MOST else None


def _name(target: object) -> str:
    """Of an aten op, whatever its overload."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""
