"""Blocks and runs of blocks as tables: what a BlockMask or a RunSchedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .band import Band, blocks_of, part_of
from .places import TileMap


class Table(NamedTuple):
    """Runs of one kind that the lines of one side visit."""

    offsets: Any  # where each line's runs begin and end, or how many blocks it has
    runs: Any


class BlockRuns(NamedTuple):
    """Which runs of blocks each row, and each column, of blocks visits.

    Row r of (b, h) visits the KV blocks [start, stop) of `kv_runs[kv_offsets[b, h, r] : kv_offsets[b, h, r + 1]]`
    under mask_mod, and those of `full_kv_*` without it. `q_*` say the same by columns: which query blocks visit a KV
    block, as the backward of key and value walks them. Offsets are int32 [B or 1, H or 1, rows + 1] and count from the
    start of the runs, int32 [count, 2], ascending and disjoint within a row; some may be empty.

    With `of_one` each run is one block, as torch's BlockMask lists them: offsets are its counts [B or 1, H or 1, rows],
    and runs its indices [B or 1, H or 1, rows, columns], which may be narrower than the row. Full ones may be absent,
    and so may columns.
    """

    q_block: int
    kv_block: int
    kv_offsets: Tensor
    kv_runs: Tensor
    full_kv_offsets: Tensor | None
    full_kv_runs: Tensor | None
    q_offsets: Tensor | None = None
    q_runs: Tensor | None = None
    full_q_offsets: Tensor | None = None
    full_q_runs: Tensor | None = None
    of_one: bool = False

    @property
    def form(self) -> str:
        return "lists" if self.of_one else "runs"

    @property
    def grids(self) -> tuple[int, int]:
        batch, heads, *_ = self.kv_offsets.shape
        return batch, heads

    @property
    def lists_queries(self) -> bool:
        return self.q_offsets is not None

    @property
    def tables(self) -> tuple[Table, Table, Table, Table]:
        """Partial and full runs by rows, then by columns."""
        return (
            Table(self.kv_offsets, self.kv_runs),
            Table(self.full_kv_offsets, self.full_kv_runs),
            Table(self.q_offsets, self.q_runs),
            Table(self.full_q_offsets, self.full_q_runs),
        )

    @staticmethod
    def of(blocks: Sequence[int], tensors: Iterable[Any], of_one: bool = False) -> BlockRuns:
        """Of eight tensors, in the order of `tables`, or of the four by rows."""
        fields: Any = dict(zip(BlockRuns._fields, (*blocks, *tensors), strict=False))
        return BlockRuns(**fields, of_one=of_one)

    def with_tables(self, tables: Iterable[Sequence[Any]]) -> BlockRuns:
        return BlockRuns.of(self[:2], [field for table in tables for field in table], self.of_one)

    def for_map(self, tile_map: TileMap) -> tuple[int, int] | None:
        if self.of_one or self.q_offsets is None:
            return None
        return self.kv_offsets.size(-1) - 1, self.q_offsets.size(-1) - 1

    def side(self, side: str) -> tuple[Table, Table | None]:
        """Partial and full runs of the lines that visit `side`, "keys" or "queries"."""
        partial, full = self.tables[:2] if side == "keys" else self.tables[2:]
        return partial, None if full.offsets is None else full

    def of_part(self, b: slice, h: slice) -> BlockRuns:
        tables = [
            table
            if table.offsets is None
            else (part_of(table.offsets, b, h), part_of(table.runs, b, h) if self.of_one else table.runs)
            for table in self.tables
        ]
        return self.with_tables(tables)

    def with_tensors(self, changed: Callable[[Tensor], Any]) -> BlockRuns:
        fields: Any = (changed(field) if isinstance(field, Tensor) else field for field in self)
        return BlockRuns(*fields)

    def bands(self, queries: int, keys: int, tile_map: TileMap | None, device: torch.device) -> _RunBands:
        return _RunBands(self, -(-keys // self.kv_block) if tile_map is None else tile_map.keys.size(0))

    def shares(self, queries: int, keys: int, tile_map: TileMap | None) -> tuple[float, float]:
        columns = -(-keys // self.kv_block) if tile_map is None else tile_map.keys.size(0)
        lines = self.kv_offsets if self.of_one else self.kv_offsets[..., 1:]
        found = []
        for table in self.side("keys"):
            if table is None:
                found.append(0.0)
                continue
            blocks = table.offsets if self.of_one else table.runs[:, 1] - table.runs[:, 0]
            found.append(blocks.sum().item() / max(lines.numel() * columns, 1))
        partial, full = found
        return partial, full


class _RunBands:
    """The tables of a call with so many KV blocks."""

    def __init__(self, runs: BlockRuns, columns: int):
        self.runs, self.columns, self.grids = runs, columns, runs.grids
        self.q_block, self.kv_block = runs.q_block, runs.kv_block

    def band(self, b: slice, h: slice, m: slice) -> Band:
        rows = blocks_of(m, self.q_block)
        partial, full = (
            None if table is None else self._flags(table, b, h, rows) for table in self.runs.side("keys")
        )
        assert partial is not None
        return Band(
            self.q_block, self.kv_block, m, partial, torch.zeros_like(partial) if full is None else full
        )

    def _flags(self, table: Table, b: slice, h: slice, rows: slice) -> Tensor:
        if self.runs.of_one:
            counts, blocks = part_of(table.offsets, b, h)[..., rows], part_of(table.runs, b, h)[..., rows, :]
            return _listed(counts, blocks, self.columns)
        offsets = part_of(table.offsets, b, h)[..., rows.start : rows.stop + 1]
        return _in_runs(offsets, table.runs, self.columns)


def _listed(counts: Tensor, blocks: Tensor, columns: int) -> Tensor:
    """Flags [..., columns] from the first `counts` entries of each row of blocks."""
    listed = torch.arange(blocks.size(-1), device=blocks.device) < counts.unsqueeze(-1)
    # Entries past the count are not meaningful: they go to a spare column.
    target = torch.where(listed, blocks, columns).to(torch.int64)
    flags = torch.zeros((*blocks.shape[:-1], columns + 1), dtype=torch.bool, device=blocks.device)
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
