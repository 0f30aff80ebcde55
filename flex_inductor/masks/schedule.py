"""RunSchedule: which tiles attention visits, in memory proportional to the rows.

A BlockMask lists every tile of every row: its four index tensors grow with the square of the length. Here a row holds
a few runs [start, stop) of neighbouring tiles instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..visits import BlockRuns, Schedule
from . import pytrees
from .cut import checked_tiles, cut_mask, cut_runs
from .errors import MaskArgumentError
from .library.algebra import offset
from .lists import LISTS, block_mask_from_runs
from .ordinary import ordinary_tensors
from .portable import portable
from .runs import FULL, PARTIAL, Extent, Runs, density, from_grid, merged, split, tables, transposed

SIDES = ("kv", "full_kv", "q", "full_q")
TENSORS = tuple(f"{side}_{part}" for side in SIDES for part in ("offsets", "runs"))
SHADES = " ░▒▓█"
BY_ROWS = ("cpu",)  # types of devices whose kernels walk rows alone, in the backward too


@dataclass(frozen=True, eq=False, repr=False)
class RunSchedule:
    r"""Which tiles attention visits, as runs of neighbouring tiles: memory grows with the rows of tiles.

    `create_block_mask(..., compact=True)` makes one, and flex_attention takes it as block_mask. It pickles, and is a
    pytree of its tensors.

    A row of tiles has the runs `kv_runs[kv_offsets[b, h, row] : kv_offsets[b, h, row + 1]]`, each a pair (start, stop).
    All tensors are int32. Offsets are [B or 1, H or 1, rows + 1], runs are [count, 2], ascending and disjoint within a
    row. Zeros follow a single run, or none: compiled code would be made again where a size becomes 0 or 1.

    Args:
        kv_offsets, kv_runs: partial tiles of each row, where mask_mod decides.
        full_kv_offsets, full_kv_runs: full tiles of each row.
        q_offsets, q_runs: partial tiles of each column, for the backward.
        full_q_offsets, full_q_runs: full tiles of each column.
        batch: the number of batches.
        heads: the number of heads.
        seq_lengths: the numbers of queries and keys.
        BLOCK_SIZE: tokens of a tile, (queries, keys).
        mask_mod: the mask inside of partial tiles.
        separate_full_blocks: whether its BlockMask lists full tiles apart.

    Example:
        >>> mask_mod = masks.document(lengths=[300, 700, 24])
        >>> schedule = create_block_mask(mask_mod, None, None, 1024, 1024, compact=True)
        >>> print(*repr(schedule).split(", sparsity"), sep="\n sparsity")
        RunSchedule(shape=(1, 1, 1024, 1024), BLOCK_SIZE=(128, 128)
         sparsity=59.38%, runs: kv=11, full_kv=4, q=12, full_q=4)
        >>> schedule.kv_offsets
        tensor([[[ 0,  1,  2,  3,  4,  6,  8, 10, 11]]], dtype=torch.int32)
        >>> schedule.row_runs().start.numel(), schedule.tensors[0].dtype
        (15, torch.int32)
        >>> schedule.to_block_mask().kv_num_blocks
        tensor([[[1, 1, 3, 2, 2, 2, 2, 6]]], dtype=torch.int32)
    """

    kv_offsets: Tensor
    kv_runs: Tensor
    full_kv_offsets: Tensor
    full_kv_runs: Tensor
    q_offsets: Tensor
    q_runs: Tensor
    full_q_offsets: Tensor
    full_q_runs: Tensor
    batch: int
    heads: int
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    separate_full_blocks: bool

    @staticmethod
    def from_runs(
        runs: Runs,
        grids: tuple[int, int],
        extent: Extent,
        mask_mod: Callable,
        separate_full_blocks: bool = True,
        jumps: tuple[Tensor, Tensor] | None = None,
    ) -> RunSchedule:
        """Make a schedule of the runs of all rows of tiles.

        Args:
            runs: of all rows, in the form that `row_runs` returns.
            grids: (batch or 1, heads or 1), for how many the runs are kept.
            extent: the sizes, as `extent` returns them.
            mask_mod: the mask inside of partial tiles.
            separate_full_blocks: whether its BlockMask lists full tiles apart.
            jumps: flags of the rows and columns that do not follow the one before; runs end there.

        Example:
            >>> old = create_block_mask(masks.causal(), None, None, 512, 512, compact=True)
            >>> new = RunSchedule.from_runs(old.row_runs(), old.grids, old.extent, old.mask_mod)
            >>> new.kv_runs.tolist()
            [[0, 1], [1, 2], [2, 3], [3, 4]]
        """
        columns = transposed(runs, grids[0] * grids[1])
        if jumps is not None:
            runs, columns = split(runs, jumps[1]), split(columns, jumps[0])
        found: Any = dict(zip(TENSORS, tables(runs, grids) + tables(columns, grids), strict=True))
        return RunSchedule(
            **found,
            batch=extent.batch,
            heads=extent.heads,
            seq_lengths=extent.lengths,
            BLOCK_SIZE=extent.block,
            mask_mod=mask_mod,
            separate_full_blocks=separate_full_blocks,
        )

    @staticmethod
    @ordinary_tensors
    def from_block_mask(block_mask: BlockMask) -> RunSchedule:
        """Make a schedule of the same tiles.

        Args:
            block_mask: of this package or of torch.

        Example:
            >>> block_mask = create_block_mask(masks.causal(), None, None, 512, 512)
            >>> RunSchedule.from_block_mask(block_mask).full_kv_runs.tolist()
            [[0, 1], [0, 2], [0, 3]]
        """
        extent = extent_of(block_mask)
        runs, grids = runs_of_block_mask(block_mask)
        separate = block_mask.full_kv_num_blocks is not None
        return RunSchedule.from_runs(runs, grids, extent, block_mask.mask_mod, separate)

    @ordinary_tensors
    def to_block_mask(self, separate_full_blocks: bool | None = None) -> BlockMask:
        """Make torch's BlockMask of the same tiles.

        Args:
            separate_full_blocks: whether it lists full tiles apart; as the schedule was made by default.

        Example:
            >>> schedule = create_block_mask(masks.causal(), None, None, 512, 512, compact=True)
            >>> schedule.to_block_mask().full_kv_num_blocks
            tensor([[[0, 1, 2, 3]]], dtype=torch.int32)
        """
        separate = self.separate_full_blocks if separate_full_blocks is None else separate_full_blocks
        return block_mask_from_runs(self.row_runs(), self.grids, self.extent, self.mask_mod, separate)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask_mod": portable(self.mask_mod, torch.empty(0, device=self.device))}

    @property
    def tensors(self) -> list[Tensor]:
        """The eight tensors, in the order of the arguments."""
        return [getattr(self, name) for name in TENSORS]

    @property
    def visits(self) -> Schedule:
        """What the ops are told to visit."""
        return _read(self, TENSORS, self.device)

    @property
    def extent(self) -> Extent:
        """Its batch, heads, lengths and block size, as one tuple."""
        return Extent(self.batch, self.heads, self.seq_lengths, self.BLOCK_SIZE)

    @property
    def grids(self) -> tuple[int, int]:
        """For how many batches and heads it has rows: 1 where the mask does not depend on them."""
        return (self.kv_offsets.shape[0], self.kv_offsets.shape[1])

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.kv_offsets.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes (batch, heads, queries, keys)."""
        return (self.batch, self.heads, *self.seq_lengths)

    @property
    def ndim(self) -> int:
        """How many sizes it has, as a mask that is a tensor has them: 4."""
        return len(self.shape)

    def row_runs(self) -> Runs:
        """Give partial and full runs of all rows in one table, as the functions for masks take them.

        Returns:
            Runs: with `line`, `start` and `stop`, int64 [runs], and `kind`, 1 for partial and 2 for full.
        """
        parts = [_lines_of(getattr(self, f"{s}_offsets"), getattr(self, f"{s}_runs")) for s in SIDES[:2]]
        kinds = [
            torch.full_like(p[0], k, dtype=torch.int8) for p, k in zip(parts, (PARTIAL, FULL), strict=True)
        ]
        line, start, stop = (torch.cat(x) for x in zip(*parts, strict=True))
        rows, columns = self.extent.tiles
        return merged(self.grids[0] * self.grids[1] * rows, columns, line, start, stop, torch.cat(kinds))

    @ordinary_tensors
    def to(self, device: torch.device | str) -> RunSchedule:
        """Move the tensors. What mask_mod captures stays where it is.

        Args:
            device: where to.

        Example:
            >>> schedule = create_block_mask(masks.causal(), None, None, 512, 512, compact=True)
            >>> schedule.to("meta").device
            device(type='meta')
        """
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})

    def sparsity(self) -> float:
        """Give the percentage of the tiles that are not visited, as BlockMask counts them from torch 2.14 on.

        Example:
            >>> create_block_mask(masks.causal(), None, None, 512, 512, compact=True).sparsity()
            37.5
        """
        runs = self.row_runs()
        visited = int((runs.stop - runs.start).sum())
        tiles = math.prod((*self.grids, *self.extent.tiles))
        return 100 * (1 - visited / tiles) if tiles else 0.0

    @ordinary_tensors
    def __getitem__(self, index: Any) -> RunSchedule:
        """Take a part of the batch, heads and rows of tiles.

        A sliced schedule describes queries that start at its first row: its mask_mod is shifted to match.

        Args:
            index: up to three integers, or slices without a step.

        Raises:
            MaskArgumentError: the index has another form, or selects nothing.

        Example:
            >>> schedule = create_block_mask(masks.causal(), None, None, 1024, 1024, compact=True)
            >>> last = schedule[:, :, 6:]  # of 8 rows of tiles
            >>> last.shape, last.sparsity()
            ((1, 1, 256, 1024), 6.25)
        """
        index = (index,) if not isinstance(index, tuple) else index
        rows, columns = self.extent.tiles
        if len(index) > 3:
            raise MaskArgumentError(
                f"RunSchedule index: expected at most (batch, heads, rows), got {len(index)} entries."
            )
        sizes = (self.batch, self.heads, rows)
        padded = (*index, slice(None), slice(None), slice(None))[:3]
        (b0, b1), (h0, h1), (r0, r1) = map(_slice_bounds, padded, sizes)
        runs = self.row_runs()
        batch, heads = self.grids
        # A grid of size 1 stands for every b or h.
        device = self.device
        take_b = torch.arange(*((b0, b1) if batch > 1 else (0, 1)), device=device)
        take_h = torch.arange(*((h0, h1) if heads > 1 else (0, 1)), device=device)
        new_line = torch.full((batch, heads, rows), -1, device=device)
        kept = take_b.numel() * take_h.numel() * (r1 - r0)
        chosen = torch.arange(kept, device=device).view(take_b.numel(), take_h.numel(), r1 - r0)
        new_line[take_b[:, None], take_h, r0:r1] = chosen
        line = new_line.view(-1)[runs.line]
        keep = line >= 0
        part = merged(kept, columns, line[keep], runs.start[keep], runs.stop[keep], runs.kind[keep])
        q_start, q_stop = (min(r * self.BLOCK_SIZE[0], self.seq_lengths[0]) for r in (r0, r1))
        extent = Extent(b1 - b0, h1 - h0, (q_stop - q_start, self.seq_lengths[1]), self.BLOCK_SIZE)
        moved = offset(self.mask_mod, b=b0, h=h0, q=q_start) if b0 or h0 or q_start else self.mask_mod
        grids = take_b.numel(), take_h.numel()
        return RunSchedule.from_runs(part, grids, extent, moved, self.separate_full_blocks)

    @ordinary_tensors
    def cut(
        self, rows: Sequence[int] | Tensor | None = None, columns: Sequence[int] | Tensor | None = None
    ) -> RunSchedule:
        """Take the queries of some rows of tiles and the keys of some columns, in the order given.

        Its mask_mod counts the tokens of the chosen tiles, as attention on the gathered tensors does.

        Args:
            rows: of tiles, all by default. A tile shorter than the others must be the last.
            columns: of tiles, all by default.

        Raises:
            MaskArgumentError: a number is no tile, or a short tile is not the last.

        Example:
            >>> schedule = create_block_mask(masks.causal(), None, None, 1024, 1024, compact=True)
            >>> part = schedule.cut(rows=[0, 7], columns=[0, 1, 7])
            >>> part.shape, part.kv_offsets.tolist()
            ((1, 1, 256, 384), [[[0, 1, 2]]])
        """
        chosen = []
        sides = zip(
            ("rows", "columns"),
            (rows, columns),
            self.seq_lengths,
            self.BLOCK_SIZE,
            self.extent.tiles,
            strict=True,
        )
        for name, given, length, block, tiles in sides:
            found = checked_tiles(name, given, tiles, length % block != 0)
            chosen.append(torch.arange(tiles) if found is None else found)
        lengths = [
            int((length - at * block).clamp(max=block).sum())
            for at, length, block in zip(chosen, self.seq_lengths, self.BLOCK_SIZE, strict=True)
        ]
        part = cut_runs(self.row_runs(), self.grids[0] * self.grids[1], chosen[0], chosen[1])
        extent = Extent(self.batch, self.heads, (lengths[0], lengths[1]), self.BLOCK_SIZE)
        at = [tiles.to(self.device) for tiles in chosen]
        mask_mod = cut_mask(self.mask_mod, self.BLOCK_SIZE, *at)
        return RunSchedule.from_runs(part, self.grids, extent, mask_mod, self.separate_full_blocks)

    def picture(self, cells: int = 20, b: int = 0, h: int = 0) -> str:
        r"""Draw it as text: the darker, the more of the tiles under a character are visited.

        Args:
            cells: at most this many a side; a cell has two characters.
            b: the batch.
            h: the head.

        Example:
            >>> schedule = create_block_mask(masks.causal(), None, None, 512, 512, compact=True)
            >>> print("\n".join(line.rstrip() for line in schedule.picture().splitlines()))
            ▒▒
            ██▒▒
            ████▒▒
            ██████▒▒
        """
        rows, columns = self.extent.tiles
        shape = (min(cells, rows), min(cells, columns))
        if 0 in shape:
            return ""
        grid = min(b, self.grids[0] - 1) * self.grids[1] + min(h, self.grids[1] - 1)
        runs = self.row_runs()
        full, partial = (density(runs, grid * rows, rows, shape, kind) for kind in (FULL, PARTIAL))
        # A cell is blank only if nothing in it is visited, and solid only if all of it is full.
        shade = ((full + partial / 2) * (len(SHADES) - 1)).round().long()
        shade = torch.where(full + partial > 0, shade.clamp(min=1), 0)
        shade = torch.where(full < 1, shade.clamp(max=len(SHADES) - 2), shade)
        return "\n".join("".join(SHADES[s] * 2 for s in line) for line in shade.tolist())

    def __repr__(self) -> str:
        counts = ", ".join(f"{side}={int(getattr(self, f'{side}_offsets').diff().sum())}" for side in SIDES)
        return (
            f"RunSchedule(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"sparsity={self.sparsity():.2f}%, runs: {counts})"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{self.picture()}"


def _lines_of(offsets: Tensor, runs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    line = torch.repeat_interleave(offsets.diff(dim=-1).reshape(-1).long())
    start, stop = runs[: line.numel()].long().unbind(1)
    return line, start, stop


def _slice_bounds(index: Any, size: int) -> tuple[int, int]:
    if isinstance(index, int) and -size <= index < size:
        return index % size, index % size + 1
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop, _ = index.indices(size)
        if start < stop:
            return start, stop
    raise MaskArgumentError(
        f"RunSchedule index: expected an integer or a non-empty slice without a step for a dimension of "
        f"size {size}, got {index!r}. Other selections: to_block_mask() and index that."
    )


def schedule_parts(block_mask: BlockMask | RunSchedule) -> tuple[Schedule, Callable]:
    """The schedule that the ops get, and the mask_mod."""
    if isinstance(block_mask, BlockMask):
        lists = _read(block_mask, LISTS, block_mask.kv_num_blocks.device, of_one=True)
        return lists, block_mask.mask_mod
    return block_mask.visits, block_mask.mask_mod


def _read(mask: Any, names: Sequence[str], device: torch.device, of_one: bool = False) -> BlockRuns:
    """What kernels of the device read. Dynamo takes 2 ms for each tensor of a mask."""
    read = names[: len(names) // 2] if device.type in BY_ROWS else names
    return BlockRuns.of(mask.BLOCK_SIZE, [getattr(mask, name) for name in read], of_one)


def extent_of(block_mask: BlockMask) -> Extent:
    batch, heads = block_mask.kv_indices.shape[:2] if block_mask.kv_indices.dim() == 4 else (1, 1)
    (q_length, kv_length), (q_block, kv_block) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    return Extent(batch, heads, (q_length, kv_length), (q_block, kv_block))


def runs_of_block_mask(block_mask: BlockMask) -> tuple[Runs, tuple[int, int]]:
    """The runs of a BlockMask's rows, and the (batch, heads) they are kept for: 1 for a dimension that is expanded."""
    rows, columns = extent_of(block_mask).tiles
    listed = [
        (block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL),
    ]
    pairs = [(c, i, kind) for c, i, kind in listed if c is not None and i is not None]
    shapes = [(1, 1) if counts.dim() < 3 else counts.shape[:2] for counts, _, _ in pairs]
    expanded = [all(i.dim() == 4 and i.stride(d) == 0 for _, i, _ in pairs) for d in (0, 1)]
    grids = tuple(1 if alone else size for alone, size in zip(expanded, shapes[0], strict=True))
    kinds = torch.zeros(*grids, rows, columns + 1, dtype=torch.int8, device=pairs[0][0].device)
    for counts, indices, kind in pairs:
        counts = counts.view(*shapes[0], -1)[: grids[0], : grids[1], :rows]
        indices = indices.view(*shapes[0], *indices.shape[-2:])[: grids[0], : grids[1], :rows, :columns]
        used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        kinds.scatter_(-1, torch.where(used, indices, columns).long(), kind)
    return from_grid(kinds[..., :columns].flatten(0, 2)), (grids[0], grids[1])


_CONTEXT = ("batch", "heads", "seq_lengths", "BLOCK_SIZE", "mask_mod", "separate_full_blocks")


def _flatten(schedule: RunSchedule) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    tensors = dict(zip(TENSORS, schedule.tensors, strict=True))
    return tensors, tuple(getattr(schedule, name) for name in _CONTEXT)


def _unflatten(tensors: Any, context: tuple[Any, ...]) -> RunSchedule:
    return RunSchedule(*tensors, *context)


pytrees.register(RunSchedule, _flatten, _unflatten)
