"""Masks that are a window, as visits/window.py has it.

Read off the steps of a traced mask_mod: comparisons of sums of q, kv and numbers, of chunks and of documents, joined by
`and`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..mod_ir.replay import Recording, is_alone, keep, replayed
from ..visits.window import ALL, Window
from .documents import may_be_ids, table_of
from .trace import INDEX_NAMES, MaskProgram, Ref, Step, name_of, trace_mask

_SEEN = "seen"  # what is kept of a trace


class Captured(NamedTuple):
    """What a call finds in a captured tensor of integers, times 1 or -1, and a number."""

    step: int  # which step of the trace the tensor is, and then its place among those that the function captures
    by_batch: bool  # whether each batch has its entry, or all the one
    factor: int
    number: int

    def read(self, captures: Sequence[Tensor], batch: int) -> Tensor:
        """As int32 [B or 1]."""
        tensor = captures[self.step]
        entries = tensor[:batch] if self.by_batch else tensor.view(1)
        return (entries.long() * self.factor + self.number).clamp(-MOST, MOST).to(torch.int32)


class Documents(NamedTuple):
    """A captured tensor with the document of each position."""

    step: int  # as of Captured
    by_batch: bool


class _Sum(NamedTuple):
    """q * query + kv * key + number, and an entry of a captured tensor times a factor."""

    q: int
    kv: int
    number: int
    factor: int = 0
    entry: tuple[int, bool] | None = None  # the tensor's step, and whether it is read at b

    def times(self, factor: int) -> _Sum:
        return _Sum(self.q * factor, self.kv * factor, self.number * factor, self.factor * factor, self.entry)

    def plus(self, other: _Sum, times: int = 1) -> _Sum | None:
        entries = {part.entry for part in (self, other) if part.factor}
        if len(entries) > 1:
            return None
        q, kv, number, factor = (a + times * b for a, b in zip(self[:4], other[:4], strict=True))
        return _Sum(q, kv, number, factor, next(iter(entries), None))

    @property
    def distance(self) -> int | Captured:
        """Without the indices."""
        return Captured(*self.entry, self.factor, self.number) if self.entry and self.factor else self.number


_OPERANDS = {"add": 2, "sub": 2, "neg": 1}
MOST = 1 << 30  # sums beyond it may wrap around, as indices are int32

_COMPARED = {  # the sign by which left - right is at least 0, and what to take away where they must differ
    "ge": (1, 0),
    "gt": (1, 1),
    "le": (-1, 0),
    "lt": (-1, 1),
}


class Seen(NamedTuple):
    window: Window | None  # that the mask is, whatever is captured
    reads_heads: bool
    program: MaskProgram | None  # where the mask was traced
    by_captures: Window | None = None  # the same with numbers that are Captured, and Documents
    captures: tuple[Tensor, ...] = ()

    @property
    def is_plain_window(self) -> bool:
        """Whether its tiles follow from their positions, to the last one."""
        return self.window is not None and self.window.has_no_gaps

    def window_now(self, batch: int | None, positions: int) -> Window | None:
        """The window whose tiles follow from their positions and from what captured tensors hold now."""
        if self.is_plain_window or self.by_captures is None:
            return self.window if self.is_plain_window else None
        used = [number for number in self.by_captures if isinstance(number, Captured | Documents)]
        sizes = [self.captures[number.step].size(0) for number in used if number.by_batch]
        if sizes and (batch is None or min(sizes) < batch):
            return None  # which the analysis refuses
        window = Window(
            *(n.read(self.captures, batch or 1) if isinstance(n, Captured) else n for n in self.by_captures)
        )
        if window.documents is None:
            return window
        ids = self.captures[window.documents.step]
        ids = ids[:batch] if window.documents.by_batch else ids.unsqueeze(0)
        table = table_of(ids, positions)
        return None if table is None else window._replace(documents=table)


def seen(mask_mod: Callable, like: Tensor) -> Seen:
    """What is known of a mask without analysis. `like` is on the indices' device.

    The function runs each time; what it calls was traced in an earlier run (mod_ir/replay.py).
    """
    known = replayed(mask_mod, INDEX_NAMES, like)
    if known is not None:
        return known.traces.graphs[_SEEN]._replace(captures=known.captures)
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
    captures = tuple(runs[0].captures) if len(runs) == 1 else ()
    found = Seen(
        window_of(program), "h" in program.reads, None, _window_by_captures(program, captures), captures
    )
    traces = keep(runs[0], INDEX_NAMES, like) if len(runs) == 1 and is_alone(like) else None
    if traces is not None:
        traces.graphs[_SEEN] = found._replace(captures=())
    return found._replace(program=program)


def window_of(program: MaskProgram) -> Window | None:
    """The window that the mask is, or None."""
    window = _window(program, Ref(program.output))
    return None if window is None or any(isinstance(n, Captured | Documents) for n in window) else window


def _window_by_captures(program: MaskProgram, captures: Sequence[Tensor]) -> Window | None:
    """The window that the mask is with numbers of captured tensors, where neighbours see ranges that touch."""
    window = _window(program, Ref(program.output))
    if window is None or not any(isinstance(n, Captured | Documents) for n in window):
        return None
    left, right = window.left, window.right
    if window.chunk or window.documents:
        if isinstance(left, Captured) or isinstance(right, Captured) or not window.has_no_gaps:
            return None
    elif isinstance(left, Captured) and isinstance(right, Captured):
        apart = left._replace(factor=-left.factor, number=right.number) != right
        if apart or left.number + right.number < 0:
            return None
    elif not isinstance(left, float) and not isinstance(right, float):
        return None
    places = {id(tensor): place for place, tensor in enumerate(captures)}
    numbers = []
    for number in window:
        if isinstance(number, Captured | Documents):
            place = places.get(id(program.steps[number.step].target))
            if place is None:
                return None
            number = number._replace(step=place)
        numbers.append(number)
    return Window(*numbers)


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
        return _same_chunk(program, *step.args) or _same_document(program, *step.args)
    if name not in _COMPARED or step.kwargs:
        return None
    sign, differ = _COMPARED[name]
    left, right = step.args
    if isinstance(left, Ref) and (inner := _absolute(program, left)) and sign < 0:
        bound = _sum(program, right)
        if bound is None or bound[:2] != (0, 0):
            return None
        number = bound.plus(_Sum(0, 0, -differ))
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
    apart = left.plus(right, -1)
    return None if apart is None else apart.times(sign).plus(_Sum(0, 0, -differ))


def _with_prefix(program: MaskProgram, *sides: object) -> Window | None:
    """Of a window or the first keys, in either order."""
    for window, other in ((_window(program, sides[0]), sides[1]), (_window(program, sides[1]), sides[0])):
        if window is not None and window._replace(right=ALL.right) == ALL:
            first = _first_keys(program, other)
            if isinstance(first, int):
                first = max(first, 0)
            return None if first is None else window._replace(prefix=first)
    return None


def _first_keys(program: MaskProgram, at: object) -> int | Captured | None:
    """How many keys a comparison with their index lets through."""
    step = program.steps[at.step] if isinstance(at, Ref) else None
    compared = None if step is None or step.kwargs else _compared(program, step)
    if compared is None or compared[:2] != (0, -1):
        return None
    return compared._replace(number=compared.number + 1).distance


def _same_chunk(program: MaskProgram, *sides: object) -> Window | None:
    found = [_quotient(program, side) for side in sides]
    sizes = {index: size for index, size in found if size}
    return Window(chunk=sizes["q"]) if len(sizes) == 2 and sizes["q"] == sizes["kv"] else None


def _same_document(program: MaskProgram, *sides: object) -> Window | None:
    found = [_entry_of_position(program, side) for side in sides]
    documents = {index: table for index, table in found if table}
    same = len(documents) == 2 and documents["q"] == documents["kv"]
    return Window(documents=documents["q"]) if same else None


def _entry_of_position(program: MaskProgram, at: object) -> tuple[str, Documents | None]:
    """Of table[q], table[kv], table[b, q] or table[b, kv] the last index and the table."""
    step = program.steps[at.step] if isinstance(at, Ref) else None
    if step is None or _name(step.target) != "index":
        return "", None
    table, indices = step.args
    found = program.steps[table.step].target if isinstance(table, Ref) else None
    names = [INDEX_NAMES[i.step] if isinstance(i, Ref) and i.step < len(INDEX_NAMES) else "" for i in indices]
    if not isinstance(found, Tensor) or found.dim() != len(names) or names[:-1] not in ([], ["b"]):
        return "", None
    known = names[-1] in ("q", "kv") and may_be_ids(found)
    return (names[-1], Documents(table.step, len(names) == 2)) if known else ("", None)


def _quotient(program: MaskProgram, at: object) -> tuple[str, int]:
    """Of q // size or kv // size the index and the size; 0 for what is neither."""
    step = program.steps[at.step] if isinstance(at, Ref) else None
    if step is None or _name(step.target) != "floor_divide":
        return "", 0
    index, size = step.args
    names = {Ref(i): name for i, name in enumerate(INDEX_NAMES) if name in ("q", "kv")}
    return (names[index], size) if index in names and type(size) is int and size > 0 else ("", 0)


def _at_least_zero(found: _Sum | None) -> Window | None:
    if found is None:
        return None
    if (found.q, found.kv) == (1, -1):
        return Window(right=found.distance)
    if (found.q, found.kv) == (-1, 1):
        return Window(left=found.distance)
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
    if step.dtype not in (torch.int32, torch.int64) or step.kwargs:
        return None
    if isinstance(step.target, Tensor):
        return _Sum(0, 0, 0, 1, (value.step, False)) if step.target.dim() == 0 else None
    if name == "index":
        return _entry_of_batch(program, *step.args)
    if len(step.args) != _OPERANDS.get(name):
        return None  # a third argument is a factor
    sums = [_sum(program, argument) for argument in step.args]
    if None in sums:
        return None
    total = sums[0].times(-1) if name == "neg" else sums[0].plus(sums[1], 1 if name == "add" else -1)
    if total is None or abs(total.number) > MOST:
        return None
    return total if max(map(abs, (total.q, total.kv, total.factor))) <= 1 else None


def _entry_of_batch(program: MaskProgram, table: object, at: object) -> _Sum | None:
    if not isinstance(table, Ref) or not isinstance(at, (list, tuple)):
        return None
    found = program.steps[table.step].target
    by_batch = isinstance(found, Tensor) and found.dim() == 1 and [*at] == [Ref(INDEX_NAMES.index("b"))]
    return _Sum(0, 0, 0, 1, (table.step, True)) if by_batch else None


def _name(target: object) -> str:
    """Of an aten op, whatever its overload."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""
