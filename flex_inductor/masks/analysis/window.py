"""Masks that are a window, see visits/window.py.

Read off a mask's graph: comparisons of sums of q, kv and numbers, of chunks and of documents, joined by `and`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...mod_ir.ranges import all_known, operation
from ...mod_ir.replay import is_alone, keep, replayed
from ...visits.window import ALL, Window
from .trace import INDEX_NAMES, MaskGraph, dtype_of, trace_mask

_SEEN = "seen"  # facts that are kept of a trace
_IDS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Captured(NamedTuple):
    """An entry of a captured tensor of integers, times 1 or -1, plus a number: read on each call."""

    place: int  # of the tensor, among those that the function captures
    by_batch: bool  # whether each batch has its own entry, or all share one
    factor: int
    number: int

    def read(self, captures: Sequence[Tensor], batch: int) -> Tensor:
        """As int32 [B or 1]."""
        tensor = captures[self.place]
        entries = tensor[:batch] if self.by_batch else tensor.view(1)
        return (entries.long() * self.factor + self.number).clamp(-MOST, MOST).to(torch.int32)


class Documents(NamedTuple):
    """A captured tensor with the document of each position."""

    place: int  # as of Captured
    by_batch: bool


class _Sum(NamedTuple):
    """q * query + kv * key + number, and an entry of a captured tensor times a factor."""

    q: int
    kv: int
    number: int
    factor: int = 0
    entry: tuple[int, bool] | None = None  # the tensor's place, and whether it is read at b

    def times(self, factor: int) -> _Sum:
        return _Sum(self.q * factor, self.kv * factor, self.number * factor, self.factor * factor, self.entry)

    def less(self, number: int) -> _Sum:
        return self._replace(number=self.number - number)

    def plus(self, other: _Sum, times: int) -> _Sum | None:
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
MOST = 1 << 30  # sums beyond it may wrap around, because indices are int32

_COMPARED = {  # (sign, differ): a comparison holds where sign * (left - right) - differ >= 0
    "ge": (1, 0),
    "gt": (1, 1),
    "le": (-1, 0),
    "lt": (-1, 1),
}


class Seen(NamedTuple):
    window: Window | None  # the window that the mask is, whatever it captures
    reads_heads: bool
    mask: MaskGraph | None  # where it was traced
    by_captures: Window | None = None  # the same with numbers that are Captured, and Documents
    captures: tuple[Tensor, ...] = ()

    @property
    def is_plain_window(self) -> bool:
        """Whether its tiles follow from their positions, to the last one."""
        return self.window is not None and self.window.has_no_gaps

    def window_now(self, batch: int | None, positions: int) -> Window | None:
        """The window from the present values of captured tensors. Its tiles follow from their positions."""
        if self.is_plain_window or self.by_captures is None:
            return self.window if self.is_plain_window else None
        used = [number for number in self.by_captures if isinstance(number, Captured | Documents)]
        sizes = [self.captures[number.place].size(0) for number in used if number.by_batch]
        if sizes and (batch is None or min(sizes) < batch):
            return None  # which the analysis refuses
        window = Window(
            *(n.read(self.captures, batch or 1) if isinstance(n, Captured) else n for n in self.by_captures)
        )
        if window.documents is None:
            return window
        ids = self.captures[window.documents.place]
        ids = ids[:batch] if window.documents.by_batch else ids.unsqueeze(0)
        table = table_of(ids, positions)
        return None if table is None else window._replace(documents=table)


def seen(mask_mod: Callable, like: Tensor) -> Seen:
    """What is known of a mask without analysis. `like` is on the indices' device.

    The function runs each time; its torch calls were traced in an earlier run (mod_ir/replay.py).
    """
    known = replayed(mask_mod, INDEX_NAMES, like)
    if known is not None:
        return known.traces.graphs[_SEEN]._replace(captures=known.captures)
    mask = trace_mask(mask_mod, like.device)
    captures = tuple(mask.run.captures) if mask.run else ()
    window = window_of(mask, captures)
    plain = window is None or all(isinstance(number, int | float | None) for number in window)
    found = Seen(
        window if plain else None,
        "h" in mask.reads,
        None,
        None if window is None or plain else _by_captures(window),
        captures,
    )
    traces = keep(mask.run, INDEX_NAMES, like) if mask.run and is_alone(like) else None
    if traces is not None:
        traces.graphs[_SEEN] = found._replace(captures=())
    return found._replace(mask=mask)


def limits_of(lane: fx.Graph) -> Window:
    """A window outside of which the mask of this lane graph is false."""
    (output,) = lane.output_node().args[0]
    return _Reader(lane, {}, at_most=True).window(output) or ALL


def window_of(mask: MaskGraph, captures: Sequence[Tensor] = ()) -> Window | None:
    """The window that the mask is, whatever these tensors hold; None if it is none."""
    places = {id(tensor): place for place, tensor in enumerate(captures)}
    captured = {
        node: (places[id(tensor)], tensor) for node, tensor in mask.captures.items() if id(tensor) in places
    }
    return _Reader(mask.graph, captured).window(mask.output)


def _by_captures(window: Window) -> Window | None:
    """A window with numbers of captured tensors, if neighbours see ranges that touch."""
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
    return window


class _Reader:
    """Finds windows in a graph of aten ops."""

    def __init__(
        self, graph: fx.Graph, captured: Mapping[fx.Node, tuple[int, Tensor]], at_most: bool = False
    ):
        """`captured` has the captured tensors with their places. With `at_most`, conditions joined by `and` that are
        no windows are left out."""
        indices = graph.find_nodes(op="placeholder")[: len(INDEX_NAMES)]
        self.indices: dict[object, str] = dict(zip(indices, INDEX_NAMES, strict=True))
        self.captured, self.at_most = captured, at_most

    def window(self, at: object) -> Window | None:
        if not isinstance(at, fx.Node):
            return Window() if at is True else None  # of `causal & True`
        name = operation(at.target)
        if name in ("bitwise_and", "logical_and"):
            left, right = map(self.window, at.args)
            if self.at_most and None in (left, right):
                return left or right
            return None if left is None or right is None else left.within(right)
        if name in ("bitwise_or", "logical_or") and not self.at_most:
            return self._with_prefix(*at.args)
        if name == "eq":
            return self._same_chunk(*at.args) or self._same_document(*at.args)
        if name not in _COMPARED or at.kwargs:
            return None
        sign, differ = _COMPARED[name]
        left, right = at.args
        if isinstance(left, fx.Node) and (inner := self._absolute(left)) and sign < 0:
            bound = self._sum(right)
            if bound is None or bound[:2] != (0, 0):
                return None
            number = bound.less(differ)
            sides = all_known(_at_least_zero(number.plus(inner, times)) for times in (1, -1))
            return None if sides is None else sides[0].within(sides[1])
        compared = self._compared(at)
        return None if compared is None else _at_least_zero(compared)

    def _compared(self, at: fx.Node) -> _Sum | None:
        """The sum that is at least 0 where the comparison holds."""
        if operation(at.target) not in _COMPARED or at.kwargs:
            return None
        sign, differ = _COMPARED[operation(at.target)]
        left, right = map(self._sum, at.args)
        if left is None or right is None:
            return None
        apart = left.plus(right, -1)
        return None if apart is None else apart.times(sign).less(differ)

    def _with_prefix(self, *sides: object) -> Window | None:
        """For a window or the first keys, in either order."""
        for window, other in ((self.window(sides[0]), sides[1]), (self.window(sides[1]), sides[0])):
            if window is not None and window._replace(right=ALL.right) == ALL:
                first = self._first_keys(other)
                if isinstance(first, int):
                    first = max(first, 0)
                return None if first is None else window._replace(prefix=first)
        return None

    def _first_keys(self, at: object) -> int | Captured | None:
        """How many keys a comparison with their index lets through."""
        compared = self._compared(at) if isinstance(at, fx.Node) else None
        if compared is None or compared[:2] != (0, -1):
            return None
        return compared._replace(number=compared.number + 1).distance

    def _same_chunk(self, *sides: object) -> Window | None:
        sizes = {index: size for index, size in map(self._quotient, sides) if size}
        return Window(chunk=sizes["q"]) if len(sizes) == 2 and sizes["q"] == sizes["kv"] else None

    def _same_document(self, *sides: object) -> Window | None:
        documents = {index: table for index, table in map(self._entry_of_position, sides) if table}
        same = len(documents) == 2 and documents["q"] == documents["kv"]
        return Window(documents=documents["q"]) if same else None

    def _entry_of_position(self, at: object) -> tuple[str, Documents | None]:
        """The last index and the table of table[q], table[kv], table[b, q] or table[b, kv]."""
        if not isinstance(at, fx.Node) or operation(at.target) != "index":
            return "", None
        table, indices = at.args
        names = [self.indices.get(index, "") for index in indices]
        if table not in self.captured or names[:-1] not in ([], ["b"]) or names[-1] not in ("q", "kv"):
            return "", None
        place, ids = self.captured[table]
        known = ids.dim() == len(names) and type(ids) is Tensor and ids.dtype in _IDS
        return (names[-1], Documents(place, len(names) == 2)) if known else ("", None)

    def _quotient(self, at: object) -> tuple[str, int]:
        """The index and the size of q // size or kv // size; 0 if it is neither."""
        if not isinstance(at, fx.Node) or operation(at.target) != "floor_divide":
            return "", 0
        index, size = at.args
        name = self.indices.get(index)
        return (name, size) if name in ("q", "kv") and type(size) is int and size > 0 else ("", 0)

    def _absolute(self, at: fx.Node) -> _Sum | None:
        return self._sum(at.args[0]) if operation(at.target) == "abs" else None

    def _sum(self, value: object) -> _Sum | None:
        if type(value) is int:
            return _Sum(0, 0, value)
        if not isinstance(value, fx.Node):
            return None
        if value in self.indices:
            return {"q": _Sum(1, 0, 0), "kv": _Sum(0, 1, 0)}.get(self.indices[value])
        if dtype_of(value) not in (torch.int32, torch.int64) or value.kwargs:
            return None
        if value in self.captured:
            return _Sum(0, 0, 0, 1, (self.captured[value][0], False))
        name = operation(value.target)
        if name == "index":
            return self._entry_of_batch(*value.args)
        if len(value.args) != _OPERANDS.get(name):
            return None  # a third argument is a factor
        sums = all_known(map(self._sum, value.args))
        if sums is None:
            return None
        total = sums[0].times(-1) if name == "neg" else sums[0].plus(sums[1], 1 if name == "add" else -1)
        if total is None or abs(total.number) > MOST:
            return None
        return total if max(map(abs, (total.q, total.kv, total.factor))) <= 1 else None

    def _entry_of_batch(self, table: fx.Node, at: Sequence[object]) -> _Sum | None:
        if table not in self.captured or [self.indices.get(index) for index in at] != ["b"]:
            return None
        place, entries = self.captured[table]
        return _Sum(0, 0, 0, 1, (place, True)) if entries.dim() == 1 else None


def _at_least_zero(found: _Sum | None) -> Window | None:
    if found is None:
        return None
    if (found.q, found.kv) == (1, -1):
        return Window(right=found.distance)
    if (found.q, found.kv) == (-1, 1):
        return Window(left=found.distance)
    return None


def table_of(ids: Tensor, positions: int) -> Tensor | None:
    """Where the document of each position begins and ends, int32 [rows, positions, 2].

    None if there are too few ids, or a document goes on after another one.
    """
    if ids.size(1) < positions or not positions:
        return None
    ids = ids[:, :positions]
    begins = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = begins.flatten().nonzero().squeeze(1)
    row = begin // positions
    if _any_twice(row, ids.flatten()[begin]):
        return None
    tokens = torch.cat((begin[1:], begin.new_tensor([ids.numel()]))) - begin
    begin = begin - row * positions
    table = torch.stack((begin, begin + tokens), 1).to(torch.int32)
    return table.repeat_interleave(tokens, 0, output_size=ids.numel()).view(*ids.shape, 2)


def _any_twice(row: Tensor, document: Tensor) -> bool:
    """Whether a row has a document in two places."""
    document = document.long()
    same_row = row[1:] == row[:-1]
    if not bool((same_row & (document[1:] < document[:-1])).any()):
        return False  # mostly: they ascend
    order = document.argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    row, document = row[order], document[order]
    return bool(((row[1:] == row[:-1]) & (document[1:] == document[:-1])).any())
