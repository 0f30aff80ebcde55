"""Runs that follow from the numbers of a window, whatever the lengths: instead of tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .band import Band, blocks_of, part_of
from .places import COUNT, INDEX, PIECE, SEQUENCE, TileMap
from .window import ON_TENSORS, Arithmetic, Tile, Window, visited

Number: TypeAlias = int | Tensor
# Where partial runs begin and end, in turn, and where full ones do.
Ends: TypeAlias = tuple[list[Any], list[Any]]


class SequenceEntry(NamedTuple):
    """A sequence's entry of the table: what its lines do not hold. A plain call is one sequence."""

    key_tile: Any  # the first of its tiles of keys
    keys: Any  # how many there are
    query_tile: Any
    queries: Any


class Line(NamedTuple):
    """One line of tiles, or many as tensors."""

    index: Any  # the position of its first token
    tokens: Any  # how many it has
    sequence: SequenceEntry


class Bounds(NamedTuple):
    """The numbers of a window. The call's mask_mod allows nothing outside of it.

    A number that changes from call to call is an int32 tensor [B or 1]. With a map each sequence has its tiles one
    after the other: sequence n has line n of `sequence_table`, int32 [sequences or more, 4], a `SequenceEntry`.
    Positions of its keys begin at 0, and its last query stands at its last key.
    """

    q_block: int
    kv_block: int
    left: Number | None  # None for no end
    right: Number | None
    chunk: Number  # 0 for none
    shift: Number | None = None  # of queries against keys; None where the last query stands at the last key
    prefix: Number = 0  # how many of the first keys all queries see
    # Where the document of each position begins and ends, int32 [B or 1, positions, 2]; None where all is one.
    # Documents are consecutive. Positions are those of keys; queries have the positions that they are counted by.
    documents: Tensor | None = None
    sequence_table: Tensor | None = None  # None for a plain call
    scattered: bool = (
        False  # whether a map's tiles of keys may lie anywhere: full runs are then of whole pieces
    )

    @property
    def form(self) -> str:
        return "bounds"

    @property
    def grids(self) -> tuple[int, int]:
        if self.sequence_table is not None:
            return 1, 1
        return max((field.size(0) for field in self if isinstance(field, Tensor)), default=1), 1

    @property
    def lists_queries(self) -> bool:
        return True

    @property
    def window(self) -> Window:
        left, right = (math.inf if end is None else end for end in (self.left, self.right))
        return Window(left, right, self.chunk, self.prefix, documents=self.documents)

    def with_numbers(self, changed: Callable[[Any], Any]) -> Bounds:
        """With what `changed` makes of each number of the window."""
        return self._with({name: changed(getattr(self, name)) for name in NUMBERS})

    def of_part(self, b: slice, _: slice) -> Bounds:
        return self.with_tensors(lambda numbers: numbers if numbers.size(0) == 1 else numbers[b])

    def with_tensors(self, changed: Callable[[Tensor], Any]) -> Bounds:
        fields: Any = (changed(field) if isinstance(field, Tensor) else field for field in self)
        return Bounds(*fields)

    def _with(self, changes: dict[str, Any]) -> Bounds:
        """`_replace` that Dynamo can trace in torch 2.11 too."""
        return Bounds(**{name: changes.get(name, getattr(self, name)) for name in self._fields})

    def for_map(self, tile_map: TileMap) -> tuple[int, int] | None:
        """Bounds hold for any number of tiles."""
        return None if self.sequence_table is None else (tile_map.queries.size(0), tile_map.keys.size(0))

    def constant_where_zero(self) -> Bounds:
        """A chunk or prefix of 0 as a constant: kernels without them are others, and Dynamo may take any number for one
        that changes."""
        return self._with({"chunk": _zero_if_none(self.chunk), "prefix": _zero_if_none(self.prefix)})

    def line(self, side: str, number: Any, queries: Any, keys: Any, on: Arithmetic) -> Line:
        """Line `number` of a plain call; it visits `side`, "keys" or "queries"."""
        block, length = (self.q_block, queries) if side == "keys" else (self.kv_block, keys)
        first, sequence = number * block, SequenceEntry(0, keys, 0, queries)
        index = first + self._shift(sequence) if side == "keys" else first
        return Line(index, on.least(length - first, block), sequence)

    def ends(self, side: str, line: Line, on: Arithmetic) -> Ends:
        """Which runs of blocks of `side` the line visits."""
        index, tokens, sequence = line
        if side == "keys":
            pieces = math.lcm(PIECE, self.kv_block) // self.kv_block if self.scattered else 1
            tile = Tile(self.q_block, index, tokens, self.kv_block, sequence.keys, 0, pieces)
            return _moved(visited(self.window, tile, on), sequence.key_tile)
        shift = self._shift(sequence)
        if self.shift is None:
            shift = on.named("shift", shift)
        tile = Tile(self.kv_block, index - shift, tokens, self.q_block, sequence.queries, shift)
        return _moved(visited(self.window.turned(), tile, on), sequence.query_tile)

    def _shift(self, sequence: SequenceEntry) -> Any:
        return sequence.keys - sequence.queries if self.shift is None else self.shift

    def all_ends(
        self, side: str, queries: int, keys: int, tile_map: TileMap | None, device: torch.device
    ) -> Ends:
        """`ends` of all lines of a call: tensors [B or 1, lines]."""
        device = next((field.device for field in self if isinstance(field, Tensor)), device)
        if tile_map is not None:
            assert self.sequence_table is not None
            lines = (tile_map.queries if side == "keys" else tile_map.keys).unsqueeze(0)
            table = self.sequence_table[lines[..., SEQUENCE].long()]
            line = Line(lines[..., INDEX], lines[..., COUNT], SequenceEntry(*table.unbind(-1)))
            return self.ends(side, line, ON_TENSORS)
        of_batches = self.with_numbers(lambda n: n[:, None] if isinstance(n, Tensor) else n)
        block, length = (self.q_block, queries) if side == "keys" else (self.kv_block, keys)
        number = torch.arange(-(-length // block), device=device).unsqueeze(0)
        line = of_batches.line(side, number, queries, keys, ON_TENSORS)
        return of_batches.ends(side, line, ON_TENSORS)

    def bands(self, queries: int, keys: int, tile_map: TileMap | None, device: torch.device) -> _BoundBands:
        columns = -(-keys // self.kv_block) if tile_map is None else tile_map.keys.size(0)
        return _BoundBands(self, self.all_ends("keys", queries, keys, tile_map, device), columns)

    def shares(self, queries: int, keys: int, tile_map: TileMap | None) -> tuple[float, float]:
        columns = -(-keys // self.kv_block) if tile_map is None else tile_map.keys.size(0)

        def share(ends: list[Tensor]) -> float:
            blocks: Any = sum(ends[1::2]) - sum(ends[::2])
            return (blocks.float().mean() / max(columns, 1)).item() if blocks.numel() else 0.0

        partial, full = self.all_ends("keys", queries, keys, tile_map, torch.device("cpu"))
        return share(partial), share(full)


NUMBERS = ("left", "right", "chunk", "shift", "prefix")


def _zero_if_none(number: Any) -> Any:
    return number if isinstance(number, Tensor) or number else 0


def _moved(ends: Ends, tiles: Any) -> Ends:
    """In a sequence whose first tile is `tiles`."""
    if isinstance(tiles, int) and tiles == 0:
        return ends
    partial, full = ([end + tiles for end in kind] for kind in ends)
    return partial, full


class _BoundBands:
    def __init__(self, bounds: Bounds, ends: Ends, columns: int):
        self.q_block, self.kv_block, self.grids = bounds.q_block, bounds.kv_block, bounds.grids
        # [runs, B or 1, 1, lines, 1]
        self.ends = [
            [
                torch.stack(torch.broadcast_tensors(*side))[:, :, None, :, None]
                for side in (kind[::2], kind[1::2])
            ]
            for kind in ends
        ]
        self.columns = torch.arange(columns, device=self.ends[0][0].device)

    def band(self, b: slice, h: slice, m: slice) -> Band:
        rows = blocks_of(m, self.q_block)
        flags = []
        for kind in self.ends:
            starts, stops = (
                torch.stack([part_of(end, b, h)[:, :, rows] for end in ends.unbind(0)]) for ends in kind
            )
            flags.append(((self.columns >= starts) & (self.columns < stops)).any(0))
        return Band(self.q_block, self.kv_block, m, *flags)
