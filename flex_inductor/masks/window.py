"""Masks that are a window: what a query sees is one range of keys around its own position.

Read off the steps of a traced mask_mod: comparisons of sums of q, kv and numbers, and of chunks, joined by `and`.
What tiles of a window visit is a few operations on their positions, and depends on no value that the host reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..mod_ir.replay import Recording, is_alone, keep, replayed
from .schedule import TENSORS, RunSchedule
from .trace import INDEX_NAMES, MaskProgram, Ref, Step, name_of, trace_mask

BLOCK = 128
_SEEN = "seen"  # what is kept of a trace


class Window(NamedTuple):
    """A query at position q sees the keys from q - left to q + right that are in its own chunk of positions."""

    left: float = math.inf
    right: float = math.inf
    chunk: int = 0  # how many positions a chunk has; 0 where there are none

    def within(self, other: Window) -> Window | None:
        """What both see, if that is a window."""
        chunks = sorted(chunk for chunk in (self.chunk, other.chunk) if chunk)
        if chunks and chunks[-1] % chunks[0]:
            return None
        return Window(min(self.left, other.left), min(self.right, other.right), chunks[0] if chunks else 0)

    def mask_mod(self, shift: Any = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The window as a mask, whose queries stand `shift` further on than they are counted."""

        def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = None
            if self.left < math.inf:
                seen = kv_idx >= q_idx + (shift - int(self.left))
            if self.right < math.inf:
                to_the_right = kv_idx <= q_idx + (shift + int(self.right))
                seen = to_the_right if seen is None else seen & to_the_right
            if self.chunk:
                own = (q_idx + shift) // self.chunk == kv_idx // self.chunk
                seen = own if seen is None else seen & own
            return q_idx == q_idx if seen is None else seen

        return window

    @property
    def has_no_gaps(self) -> bool:
        """Whether neighbours see ranges that touch, so that what a tile sees is one range too."""
        return min(self.left, self.right) >= 0 if self.chunk else self.left + self.right >= 0

    def turned(self) -> Window:
        """What a key is seen by."""
        return Window(self.right, self.left, self.chunk)

    def begin(self, position: Tensor, origin: Tensor | int) -> Tensor | None:
        """The first that is seen from `position`; None for the first of all. Both count from `origin` on."""
        found = position - int(self.left) if self.left < math.inf else None
        if self.chunk:
            own = _chunk(position, self.chunk, origin)
            found = own if found is None else torch.maximum(found, own)
        return None if found is None else _from_zero(found)

    def end(self, position: Tensor, origin: Tensor | int, last: Tensor) -> Tensor:
        """Behind the last that is seen, at most `last`."""
        found = position + (int(self.right) + 1) if self.right < math.inf else None
        if self.chunk:
            own = _chunk(position, self.chunk, origin) + self.chunk
            found = own if found is None else torch.minimum(found, own)
        return last if found is None else torch.minimum(_from_zero(found), last)


def _from_zero(x: Tensor) -> Tensor:
    """Not by clamp: at the larger of 0 and a place in a range torch 2.13's Inductor fails."""
    return torch.where(x > 0, x, 0)


def _chunk(position: Tensor, size: int, origin: Tensor | int) -> Tensor:
    """Where the chunk of a position begins."""
    return (position + origin) // size * size - origin


ALL = Window()


class Side(NamedTuple):
    """Tiles of one side, an entry for each: what they see of the other side, in tiles of `others_block`."""

    block: int
    least: Tensor  # the position of its first token, as the other side counts
    tokens: Tensor  # how many it has
    others_block: int
    last: Tensor  # how many the other side has
    origin: Tensor | int = 0  # the position from which the other side counts
    pieces: int = 1  # full runs have multiples of so many tiles


def visited(window: Window, side: Side) -> tuple[list[Tensor], list[Tensor]]:
    """Where runs of partial tiles begin and end, in turn, and runs of full ones. Some are empty.

    A tile is full if its tokens all see all of the other's, and both have as many as a tile can. Of a window with gaps
    there may be partial tiles of which nothing is seen.
    """
    block, least, tokens, others, last, origin, pieces = side
    whole = others * pieces
    most = least + tokens - 1
    end = window.end(most, origin, last)
    stop = torch.where(tokens > 0, (end + (others - 1)) // others, 0)
    full_stop = torch.where(tokens == block, window.end(least, origin, last) // whole * pieces, 0)
    begin = window.begin(least, origin)
    if begin is None:
        return [full_stop, stop], [torch.zeros_like(stop), full_stop]
    start = begin // others
    stop = torch.where(begin < end, stop, 0).maximum(start)
    all_see = window.begin(most, origin)
    assert all_see is not None
    full_start = torch.minimum(((all_see + (whole - 1)) // whole * pieces).maximum(start), stop)
    full_stop = full_stop.maximum(full_start)
    return [start, full_start, full_stop, stop], [full_start, full_stop]


def runs_between(ends: list[Tensor], first: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Offsets [1, 1, lines + 1] and runs, of which each line has those between two `ends`, counted from `first`."""
    lines, each = ends[0].numel(), len(ends) // 2
    if isinstance(first, Tensor):
        first = first[:, None]
    runs = (torch.stack(ends, 1) + first).to(torch.int32).view(lines * each, 2)
    offsets = torch.arange(0, (lines + 1) * each, each, dtype=torch.int32, device=runs.device)
    return offsets[None, None], runs


def schedule_of(window: Window, queries: int, keys: int, device: torch.device) -> RunSchedule:
    """Of a call whose last query stands at the last key. In a graph it is a few operations for each new length."""
    shift = keys - queries
    queries_see = visited(window, _side(queries, keys, shift, 0, device))
    keys_see = visited(window.turned(), _side(keys, queries, -shift, shift, device))
    tensors = [tensor for ends in (*queries_see, *keys_see) for tensor in runs_between(ends)]
    return RunSchedule(
        **dict(zip(TENSORS, tensors, strict=True)),
        batch=1,
        heads=1,
        seq_lengths=(queries, keys),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=window.mask_mod(shift),
    )


def _side(length: int, others: int, shift: int, origin: int, device: torch.device) -> Side:
    """There are two tiles at least: what has one of something, torch compiles by itself."""
    at = torch.arange(max(-(-length // BLOCK), 2), device=device) * BLOCK
    tokens = _from_zero(length - at).clamp(max=BLOCK)
    return Side(BLOCK, at + shift, tokens, BLOCK, torch.full_like(at, others), origin)


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
    sums = [_sum(program, side) for side in (left, right)]
    if None in sums:
        return None
    return _at_least_zero(sums[0].plus(sums[1], -1).times(sign).plus(_Sum(0, 0, -differ)))


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
