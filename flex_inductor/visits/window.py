"""Windows: what a query sees is one range of keys around its own position.

What a tile visits is an expression of its place, written once for tensors of many tiles and for the text of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Arithmetic(Protocol):
    """Functions that expressions need beside operators. Only numbers of at least 0 are divided."""

    def least(self, x: Any, y: Any) -> Any: ...

    def most(self, x: Any, y: Any) -> Any: ...

    def either(self, condition: Any, x: Any, y: Any) -> Any: ...

    def named(self, name: str, value: Any) -> Any:
        """`value` under that name, for readers."""
        ...

    def looked_up(self, table: Any, place: Any, column: int) -> Any:
        """A table's entry for a place, in one of its columns."""
        ...


class OnTensors:
    """Tensors, beside which there may be numbers."""

    def least(self, x: Any, y: Any) -> Any:
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        return torch.minimum(x, y) if both else torch.where(x < y, x, y)

    def most(self, x: Any, y: Any) -> Any:
        # Not by clamp: at the larger of 0 and a place in a range torch 2.13's Inductor fails.
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        return torch.maximum(x, y) if both else torch.where(x > y, x, y)

    def either(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y)

    def named(self, name: str, value: Any) -> Any:
        return value

    def looked_up(self, table: Tensor, place: Tensor, column: int) -> Tensor:
        return torch.take_along_dim(table[..., column], torch.atleast_2d(place), 1)


class Window(NamedTuple):
    """A query at position q sees the keys from q - left to q + right that are in its own chunk and document.

    Its numbers are of any type that expressions are made of. Only a missing end is a float.
    """

    left: Any = math.inf
    right: Any = math.inf
    chunk: Any = 0  # how many positions a chunk has; 0 where there are none
    # How many of the first keys all queries see. Only for windows without a left end and without chunks.
    prefix: Any = 0
    own_prefix: Any = 0  # the same of a turned window: how many of the first see all
    # A table of where each position's document begins and ends; None where all is one.
    documents: Any = None

    def within(self, other: Window) -> Window | None:
        """The window of what both see, if there is one."""
        if self.prefix or other.prefix:
            return self if other in (ALL, self) else other if self == ALL else None
        chunks = sorted(chunk for chunk in (self.chunk, other.chunk) if chunk)
        if chunks and chunks[-1] % chunks[0]:
            return None
        documents = {window.documents for window in (self, other)} - {None}
        if len(documents) > 1:
            return None
        left, right = _nearer(self.left, other.left), _nearer(self.right, other.right)
        if None in (left, right):
            return None
        return Window(left, right, chunks[0] if chunks else 0, documents=next(iter(documents), None))

    def mask_mod(self, shift: Any = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The window as a mask. A query's position is its index plus `shift`."""

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
            if self.prefix:
                seen = seen | (kv_idx < self.prefix)
            return q_idx == q_idx if seen is None else seen

        return window

    @property
    def has_chunks(self) -> bool:
        return not _none(self.chunk)

    @property
    def has_no_gaps(self) -> bool:
        """Whether neighbours see ranges that touch: then a tile sees one range too."""
        if self.chunk or self.documents is not None:
            return min(self.left, self.right) >= 0
        return self.left + self.right >= 0

    def turned(self) -> Window:
        """The window of the queries that see a key."""
        return Window(self.right, self.left, self.chunk, self.own_prefix, self.prefix, self.documents)

    def begin(self, position: Any, origin: Any, on: Arithmetic) -> Any:
        """The first that is seen from `position`; None for the first of all. Both count from `origin` on."""
        found = None if isinstance(self.left, float) else position - self.left
        if self.has_chunks:
            own = _chunk(position, self.chunk, origin)
            found = own if found is None else on.most(found, own)
        if self.documents is not None:
            own = on.looked_up(self.documents, position + origin, BEGIN) - origin
            found = own if found is None else on.most(found, own)
        if found is None:
            return None
        found = on.most(found, 0)
        return found if _none(self.own_prefix) else on.either(position + origin < self.own_prefix, 0, found)

    def end(self, position: Any, origin: Any, last: Any, on: Arithmetic) -> Any:
        """One past the last that is seen, at most `last`."""
        found = None if isinstance(self.right, float) else position + self.right + 1
        if self.has_chunks:
            own = _chunk(position, self.chunk, origin) + self.chunk
            found = own if found is None else on.least(found, own)
        if self.documents is not None:
            own = on.looked_up(self.documents, position + origin, END) - origin
            found = own if found is None else on.least(found, own)
        if found is None:
            return last
        found = on.most(found, 0)
        return on.least(found if _none(self.prefix) else on.most(found, self.prefix), last)


def _nearer(x: Any, y: Any) -> Any:
    """The lesser of two distances; None where that is not known."""
    if isinstance(x, float) or isinstance(y, float):
        return y if isinstance(x, float) else x
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else None


def _none(number: Any) -> bool:
    return isinstance(number, int) and number == 0


def _chunk(position: Any, size: int, origin: Any) -> Any:
    """Where the chunk of a position begins, which may be negative."""
    return position - (position + origin) % size


ALL = Window()
ON_TENSORS = OnTensors()
BEGIN, END = 0, 1  # the columns of a table of documents


class Tile(NamedTuple):
    """A tile of one side, or many as tensors: what it sees of the other side, in tiles of `others_block`."""

    block: int
    least: Any  # the position of its first token, as the other side counts
    tokens: Any  # how many it has
    others_block: int
    last: Any  # how many the other side has
    origin: Any = 0  # the position from which the other side counts
    pieces: int = 1  # full runs have multiples of so many tiles


def visited(window: Window, tile: Tile, on: Arithmetic) -> tuple[list[Any], list[Any]]:
    """Where runs of partial tiles begin and end, in turn, and runs of full ones. Some are empty.

    A pair of tiles is full if both have all their tokens and all see each other. A window with gaps may have partial
    tiles in which nothing is seen.
    """
    block, least, tokens, others, last, origin, pieces = tile
    unit = others * pieces
    least, tokens = on.named("least", least), on.named("tokens", tokens)
    most = on.named("most", least + tokens - 1)
    end = on.named("end", window.end(most, origin, last, on))
    stop = on.either(tokens > 0, (end + (others - 1)) // others, 0)
    full_stop = on.either(tokens == block, window.end(least, origin, last, on) // unit * pieces, 0)
    begin = window.begin(least, origin, on)
    if begin is None:
        stop, full_stop = on.named("stop", stop), on.named("full_stop", full_stop)
        return [full_stop, stop], [stop * 0, full_stop]
    begin = on.named("begin", on.least(begin, last))
    start = on.named("start", begin // others)
    stop = on.named("stop", on.most(on.either(begin < end, stop, 0), start))
    all_see = window.begin(most, origin, on)
    full_start = on.least(on.most((all_see + (unit - 1)) // unit * pieces, start), stop)
    full_start = on.named("full_start", full_start)
    full_stop = on.named("full_stop", on.most(full_stop, full_start))
    return [start, full_start, full_stop, stop], [full_start, full_stop]
