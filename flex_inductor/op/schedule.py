"""What to visit, as data: block lists, runs or bounds, in the form the ops carry and the chunked route reads.

A schedule's class is its tag, and `form` the tag's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..windows import ON_NUMBERS, ON_TENSORS, Arithmetic, Side, Window, visited
from .tile_map import COUNT, INDEX, PIECE, SEQUENCE, TileMap


class Visits(NamedTuple):
    """What the lines of one side visit: counts and indices, or offsets and runs."""

    partial_counts: Tensor
    partial_blocks: Tensor
    full_counts: Tensor | None
    full_blocks: Tensor | None


class BlockLists(NamedTuple):
    """The part of a BlockMask that says what to visit.

    Lists are [B or 1, H or 1, rows] counts and [B or 1, H or 1, rows, columns] indices, once for each
    row of query blocks (`kv_*`) and once for each column of KV blocks (`q_*`, absent when the mask
    was made without them). `full_*` blocks need no mask_mod.
    """

    q_block: int
    kv_block: int
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None

    @property
    def form(self) -> str:
        return "lists"

    @property
    def grids(self) -> tuple[int, int]:
        """For how many batches and heads it says so; 1 for all of them."""
        return self.kv_num_blocks.size(0), self.kv_num_blocks.size(1)

    @property
    def lists_queries(self) -> bool:
        """Whether it also says which query blocks visit a KV block."""
        return self.q_num_blocks is not None


class BlockRuns(NamedTuple):
    """The part of a RunSchedule that says what to visit: ranges of blocks, so memory by rows.

    Row r of (b, h) visits the KV blocks [start, stop) of `kv_runs[kv_offsets[b, h, r] : kv_offsets[b, h, r + 1]]`
    under mask_mod, and those of `full_kv_*` as they are. `q_*` say the same by columns: which query blocks
    visit a KV block, as the backward of key and value walks them. Offsets are int32 [B or 1, H or 1, rows + 1]
    and count from the start of the runs, int32 [count, 2], ascending and disjoint within a row; some may be empty.
    """

    q_block: int
    kv_block: int
    kv_offsets: Tensor
    kv_runs: Tensor
    full_kv_offsets: Tensor
    full_kv_runs: Tensor
    q_offsets: Tensor
    q_runs: Tensor
    full_q_offsets: Tensor
    full_q_runs: Tensor

    @property
    def form(self) -> str:
        return "runs"

    @property
    def grids(self) -> tuple[int, int]:
        return self.kv_offsets.size(0), self.kv_offsets.size(1)

    @property
    def lists_queries(self) -> bool:
        return True

    def band(self, b: slice, h: slice, m: slice) -> Band:
        """What the queries `m` visit."""
        rows = _blocks_of(m, self.q_block)
        columns = self.q_offsets.size(-1) - 1

        def flags(offsets: Tensor, runs: Tensor) -> Tensor:
            return _in_runs(_part(offsets, b, h)[..., rows.start : rows.stop + 1], runs, columns)

        partial = flags(self.kv_offsets, self.kv_runs)
        full = flags(self.full_kv_offsets, self.full_kv_runs)
        return Band(self.q_block, self.kv_block, m, partial, full)


Number: TypeAlias = int | Tensor


class RowBounds(NamedTuple):
    """Instead of tables what they follow from: the numbers of a window, whatever the lengths.

    A mask_mod beside it lets nothing else through. A number that changes from call to call is an int32 tensor [B or 1].
    """

    q_block: int
    kv_block: int
    left: Number | None  # None for no end
    right: Number | None
    chunk: Number  # 0 for none
    shift: Number | None  # of queries against keys; None where the last query stands at the last key
    prefix: Number = 0  # how many of the first keys all queries see
    # Where the document of each position begins and ends, int32 [B or 1, positions, 2]; None where all is one.
    # Documents are consecutive, and positions those of keys: queries stand where they are counted.
    documents: Tensor | None = None

    @property
    def form(self) -> str:
        return "bounds"

    @property
    def grids(self) -> tuple[int, int]:
        return max((field.size(0) for field in self if isinstance(field, Tensor)), default=1), 1

    @property
    def lists_queries(self) -> bool:
        return True

    @property
    def window(self) -> Window:
        return _window(self)._replace(documents=self.documents)

    def with_numbers(self, changed: Callable[[Any], Any]) -> RowBounds:
        """With what `changed` makes of each number of the window."""
        fields: Any = (*self[:2], *map(changed, self[2:-1]), self.documents)
        return RowBounds(*fields)

    def with_tensors(self, changed: Callable[[Tensor], Any]) -> RowBounds:
        """With what `changed` makes of each tensor."""
        fields: Any = (changed(field) if isinstance(field, Tensor) else field for field in self)
        return RowBounds(*fields)

    def of_batch(self, b: int) -> RowBounds:
        """Where numbers are no tensors, and documents those of one batch, on the host."""
        bounds = self.with_numbers(lambda n: int(n[b % n.size(0)]) if isinstance(n, Tensor) else n)
        return bounds.with_tensors(lambda table: table[b % table.size(0)].unsqueeze(0).cpu())

    def row(self, line: Any, queries: Any, keys: Any, on: Arithmetic) -> tuple[list[Any], list[Any]]:
        """What a row of query blocks visits, as `visited` gives it."""
        shift = keys - queries if self.shift is None else self.shift
        first = line * self.q_block
        tokens = on.least(queries - first, self.q_block)
        return visited(self.window, Side(self.q_block, first + shift, tokens, self.kv_block, keys), on)

    def column(self, line: Any, queries: Any, keys: Any, on: Arithmetic) -> tuple[list[Any], list[Any]]:
        """Which blocks of queries visit a block of keys."""
        shift = keys - queries if self.shift is None else self.shift
        first = line * self.kv_block
        tokens = on.least(keys - first, self.kv_block)
        side = Side(self.kv_block, first - shift, tokens, self.q_block, queries, shift)
        return visited(self.window.turned(), side, on)


class OfSequence(NamedTuple):
    """What the line of a tile in a map does not say of the tile's sequence: a line of a table."""

    key_tile: Any  # the first of its tiles of keys
    keys: Any  # how many there are
    query_tile: Any
    queries: Any


class SequenceBounds(NamedTuple):
    """The same for a call with a map, each of whose sequences has its tiles one after the other.

    Sequence n has line n of `sequence_table`, int32 [sequences or more, 4]: `OfSequence`. Positions of keys begin
    at 0 and the last query stands at the last key.
    """

    q_block: int
    kv_block: int
    left: Number | None
    right: Number | None
    chunk: Number
    prefix: Number
    scattered: bool  # whether tiles of keys may lie anywhere: full runs are then of whole pieces
    sequence_table: Tensor

    @property
    def form(self) -> str:
        return "bounds of sequences"

    @property
    def grids(self) -> tuple[int, int]:
        return 1, 1

    @property
    def lists_queries(self) -> bool:
        return True

    @property
    def window(self) -> Window:
        return _window(self)

    def with_numbers(self, changed: Callable[[Any], Any]) -> SequenceBounds:
        """With what `changed` makes of each number of the window."""
        left, right, chunk, prefix = map(changed, self[2:6])
        blocks, rest = (self.q_block, self.kv_block), (self.scattered, self.sequence_table)
        return SequenceBounds(*blocks, left, right, chunk, prefix, *rest)

    def row(self, index: Any, tokens: Any, of: OfSequence, on: Arithmetic) -> tuple[list[Any], list[Any]]:
        """What a tile of so many queries visits, whose first has position `index`."""
        pieces = math.lcm(PIECE, self.kv_block) // self.kv_block if self.scattered else 1
        side = Side(self.q_block, index, tokens, self.kv_block, of.keys, 0, pieces)
        return _moved(visited(self.window, side, on), of.key_tile)

    def column(self, index: Any, tokens: Any, of: OfSequence, on: Arithmetic) -> tuple[list[Any], list[Any]]:
        """Which tiles of queries visit a tile of keys."""
        shift = on.named("shift", of.keys - of.queries)
        side = Side(self.kv_block, index - shift, tokens, self.q_block, of.queries, shift)
        return _moved(visited(self.window.turned(), side, on), of.query_tile)

    def rows(self, lines: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """`row` of all tiles of queries in a map, as tensors with an entry for each."""
        return self.row(*self.of_lines(lines), ON_TENSORS)

    def of_lines(self, lines: Tensor) -> tuple[Tensor, Tensor, OfSequence]:
        """What `row` or `column` is asked with for all lines of one side of a map."""
        table = self.sequence_table[lines[:, SEQUENCE].long()]
        return lines[:, INDEX], lines[:, COUNT], OfSequence(*table.unbind(1))


def _window(bounds: RowBounds | SequenceBounds) -> Window:
    left, right = (math.inf if end is None else end for end in (bounds.left, bounds.right))
    return Window(left, right, bounds.chunk, bounds.prefix)


def _moved(found: tuple[list[Any], list[Any]], tiles: Any) -> tuple[list[Any], list[Any]]:
    partial, full = ([end + tiles for end in ends] for ends in found)
    return partial, full


class _PlacedLists:
    """Lists, for a call with so many keys. Their last dimension may be smaller than the number of KV blocks."""

    def __init__(self, lists: BlockLists, keys: int):
        self.lists, self.columns = lists, -(-keys // lists.kv_block)
        self.grids, self.q_block, self.kv_block = lists.grids, lists.q_block, lists.kv_block

    def band(self, b: slice, h: slice, m: slice) -> Band:
        """What the queries `m` visit."""
        rows = _blocks_of(m, self.q_block)

        def flags(counts: Tensor, indices: Tensor) -> Tensor:
            return _listed(_part(counts, b, h)[..., rows], _part(indices, b, h)[..., rows, :], self.columns)

        partial = flags(self.lists.kv_num_blocks, self.lists.kv_indices)
        if self.lists.full_kv_num_blocks is None:
            return Band(self.q_block, self.kv_block, m, partial, torch.zeros_like(partial))
        full = flags(self.lists.full_kv_num_blocks, self.lists.full_kv_indices)
        return Band(self.q_block, self.kv_block, m, partial, full)


class _Placed:
    """Bounds, read by the host for a call of these lengths."""

    def __init__(self, bounds: RowBounds, queries: int, keys: int, device: torch.device):
        self.grids, self.q_block, self.kv_block = bounds.grids, bounds.q_block, bounds.kv_block
        self.of_batches = [bounds.of_batch(b) for b in range(self.grids[0])]
        self.queries, self.keys, self.device = queries, keys, device

    def band(self, b: slice, h: slice, m: slice) -> Band:
        """What the queries `m` visit."""
        rows, chosen = (
            _blocks_of(m, self.q_block),
            self.of_batches if self.grids[0] == 1 else self.of_batches[b],
        )
        columns = -(-self.keys // self.kv_block)
        flags = torch.zeros(2, len(chosen), 1, rows.stop - rows.start, columns, dtype=torch.bool)
        for batch, bounds in enumerate(chosen):
            for row in range(rows.start, rows.stop):
                found = bounds.row(row, self.queries, self.keys, ON_NUMBERS)
                for kind, ends in zip(flags, found, strict=True):
                    for start, stop in zip(ends[::2], ends[1::2], strict=True):
                        kind[batch, 0, row - rows.start, start:stop] = True
        return Band(self.q_block, self.kv_block, m, *flags.to(self.device))


class _PlacedInMap:
    """Bounds of sequences for a call with this map. Queries are counted tile by tile, `q_block` for each."""

    grids = 1, 1

    def __init__(self, bounds: SequenceBounds, tile_map: TileMap):
        self.q_block, self.kv_block = bounds.q_block, bounds.kv_block
        self.ends = [
            [torch.stack(ends).unsqueeze(-1) for ends in (kind[::2], kind[1::2])]
            for kind in bounds.rows(tile_map.queries)
        ]
        self.tiles = torch.arange(tile_map.keys.size(0), device=tile_map.keys.device)

    def band(self, b: slice, h: slice, m: slice) -> Band:
        """What the queries `m` visit."""
        rows = _blocks_of(m, self.q_block)
        flags = [
            ((self.tiles >= starts[:, rows]) & (self.tiles < stops[:, rows])).any(0)
            for starts, stops in self.ends
        ]
        return Band(self.q_block, self.kv_block, m, *(kind[None, None] for kind in flags))


Bounds: TypeAlias = RowBounds | SequenceBounds
Schedule: TypeAlias = BlockLists | BlockRuns | Bounds
FORMS: dict[str, type] = {
    "lists": BlockLists,
    "runs": BlockRuns,
    "bounds": RowBounds,
    "bounds of sequences": SequenceBounds,
}


def placed(
    schedule: Schedule | None, query: Tensor, key: Tensor, tile_map: TileMap | None = None, device: Any = None
) -> Any:
    """The schedule as what has bands, for a call with this query, key and map; on their device."""
    if isinstance(schedule, SequenceBounds):
        assert tile_map is not None
        return _PlacedInMap(schedule, tile_map)
    if isinstance(schedule, RowBounds):
        return _Placed(schedule, query.size(2), key.size(2), device or query.device)
    return _PlacedLists(schedule, key.size(2)) if isinstance(schedule, BlockLists) else schedule


def by_rows(schedule: Any) -> Visits:
    """Which blocks of keys each row of query blocks visits."""
    return Visits(*schedule[2:6])


def by_columns(schedule: Any) -> Visits:
    """Which blocks of queries visit each block of keys."""
    return Visits(*schedule[6:10])


class Band:
    """Some rows of queries against all KV blocks as dense flags, for walking tiles of other sizes than blocks."""

    def __init__(self, q_block: int, kv_block: int, m: slice, partial: Tensor, full: Tensor):
        self.q_block, self.kv_block, self.m = q_block, kv_block, m
        self.visited, self.full = partial | full, full  # [B or 1, H or 1, rows, columns]
        self._visited_on_host, self._full_on_host = self.visited.cpu(), self.full.cpu()

    def key_tiles(self, keys: int, step: int) -> Iterator[slice]:
        """Those of the tiles of `step` keys in which any block is visited."""
        columns = self.visited.size(-1)
        seen = torch.nn.functional.pad(self._visited_on_host.flatten(0, -2).any(0).cumsum(0), (1, 0))
        start = torch.arange(0, keys, step)
        first = (start // self.kv_block).clamp(max=columns)
        last = ((start + step).clamp(max=keys) + self.kv_block - 1) // self.kv_block
        for at in start[seen[last.clamp(max=columns)] > seen[first]].tolist():
            yield slice(at, min(at + step, keys))

    def visits_all(self, n: slice) -> bool:
        return bool(self._visited_on_host[..., _blocks_of(n, self.kv_block)].all())

    def all_full(self, n: slice) -> bool:
        return bool(self._full_on_host[..., _blocks_of(n, self.kv_block)].all())

    def lanes(self, n: slice) -> tuple[Tensor, Tensor]:
        """Flags for each lane of the rows and the keys `n`: in a visited block, and in a full one."""
        return self._lanes(self.visited, n), self._lanes(self.full, n)

    def _lanes(self, flags: Tensor, n: slice) -> Tensor:
        blocks = flags[..., _blocks_of(n, self.kv_block)]
        rows, columns = blocks.shape[2:]
        lanes = blocks[..., :, None, :, None].expand(-1, -1, -1, self.q_block, -1, self.kv_block)
        lanes = lanes.reshape(*blocks.shape[:2], rows * self.q_block, columns * self.kv_block)
        first_row, first_column = self.m.start % self.q_block, n.start % self.kv_block
        return lanes.narrow(2, first_row, self.m.stop - self.m.start).narrow(
            3, first_column, n.stop - n.start
        )


def _blocks_of(tokens: slice, block: int) -> slice:
    return slice(tokens.start // block, -(-tokens.stop // block))


def _part(tensor: Tensor, b: slice, h: slice) -> Tensor:
    """The batches and heads that a tile is about; a dimension of size 1 stands for all."""
    tensor = tensor if tensor.size(0) == 1 else tensor[b]
    return tensor if tensor.size(1) == 1 else tensor[:, h]


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Flags [..., columns] from the first `counts` entries of each index row."""
    listed = torch.arange(indices.size(-1), device=indices.device) < counts.unsqueeze(-1)
    # Entries past the count are not meaningful: they go to a spare column.
    target = torch.where(listed, indices, columns).to(torch.int64)
    flags = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, target, True)[..., :columns]


def _in_runs(offsets: Tensor, runs: Tensor, columns: int) -> Tensor:
    """Flags [..., rows, columns] from the runs between each two offsets of [..., rows + 1]."""
    counts = offsets.diff()
    line = torch.repeat_interleave(counts.flatten())
    before = counts.flatten().cumsum(0) - counts.flatten()
    place = torch.arange(line.numel(), device=line.device) - before[line]
    start, stop = runs[offsets[..., :-1].flatten()[line] + place].unbind(1)
    # +1 where a run begins, -1 where it ends: the running sum is 1 inside.
    edges = torch.zeros((counts.numel(), columns + 1), dtype=torch.int8, device=runs.device)
    ones = torch.ones_like(start, dtype=torch.int8)
    edges.index_put_((line, start), ones, accumulate=True)
    edges.index_put_((line, stop), -ones, accumulate=True)
    return edges.cumsum(1, dtype=torch.int8)[:, :columns].bool().view(*counts.shape, columns)
