"""Where the tokens of sequences lie: packed one after the other, in the rows of a cache, or in pages.

Nothing here is read on the host, and no shape depends on values. Values may have been copied into the tensors since the
check, so they are clamped to the room that there is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """One side of a call, an entry for each tile; each begins at its sequence's first token or whole tiles further on.

    There are as many tiles as may ever be needed; those that are not needed have no tokens.
    """

    block: int
    sequence: Tensor  # any that `of` knows, for tiles that are not needed
    start: Tensor  # its first token, within the sequence; a possible one for tiles that are not needed
    tokens: Tensor  # how many it has
    first: Tensor  # for each sequence, its first tile

    def of(self, *by_sequence: Tensor) -> tuple[Tensor, ...]:
        """For each tile its sequence's number in each of `by_sequence`; tiles that are not needed may have 0."""
        return with_zeros(by_sequence)[self.sequence].unbind(1)

    def lines(self, places: Places, shift: Tensor | int) -> Tensor:
        """The lines of a tile map, whose indices are positions in the sequence plus `shift`."""
        batch, row = places.at(self)
        sequence = torch.where(self.tokens > 0, self.sequence, 0)
        columns = [batch, row, sequence, torch.zeros_like(row), self.start + shift, self.tokens]
        return torch.stack(columns, 1).to(torch.int32)


def with_zeros(by_sequence: Sequence[Tensor]) -> Tensor:
    """[sequences + 1, fields], where the last sequence is none."""
    fields = torch.stack(list(by_sequence), 1)
    return torch.cat([fields, fields.new_zeros(1, fields.size(1))])


def _in_turn(lengths: Tensor, most: int, block: int) -> Tiles:
    """At most `most` tiles, those that are needed one after the other."""
    tiles = (lengths + (block - 1)) // block
    ends = tiles.cumsum(0)
    at = torch.arange(_several(most), device=lengths.device)
    sequence = torch.searchsorted(ends, at, right=True)
    length, first = with_zeros((lengths, ends - tiles))[sequence].unbind(1)
    start = torch.where(length > 0, (at - first) * block, 0)
    return Tiles(block, sequence, start, (length - start).clamp(0, block), ends - tiles)


def _in_rows(lengths: Tensor, longest: int, block: int) -> Tiles:
    """As many tiles for each sequence as the longest may need."""
    count, most = lengths.numel(), _several(-(-longest // block))
    ints: Any = {"dtype": torch.int32, "device": lengths.device}
    start = torch.arange(0, most * block, block, **ints).expand(count, most)
    tokens = (lengths.to(torch.int32)[:, None] - start).clamp(0, block)
    sequence = torch.arange(count, **ints)[:, None].expand(count, most)
    first = torch.arange(0, count * most, most, device=lengths.device)
    return Tiles(block, sequence.flatten(), start.flatten(), tokens.flatten(), first)


def _several(number: int) -> int:
    """At least two: torch specializes sizes 0 and 1."""
    return max(number, 2)


class Packed(NamedTuple):
    starts: Tensor
    lengths: Tensor
    total: int

    @staticmethod
    def within(offsets: Tensor, used: Tensor | None, total: int) -> Packed:
        starts, lengths = offsets[:-1].long(), offsets.diff() if used is None else used
        there = torch.minimum(lengths.long(), total - starts)
        there = torch.where(starts >= 0, there, 0).clamp(min=0)
        # Sequences that overlap may add up to more, but there are tiles for so many tokens.
        ends = there.cumsum(0).clamp(max=total)
        return Packed(starts, ends.diff(prepend=ends.new_zeros(1)), total)

    def tiles(self, block: int) -> Tiles:
        return _in_turn(self.lengths, self.total // block + self.lengths.numel(), block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """The batch and the row in which each tile begins."""
        return torch.zeros_like(tiles.start), tiles.of(self.starts)[0] + tiles.start

    def largest_block(self) -> int | None:
        """A tile has at most so many tokens; None for any number."""
        return None


class Cached(NamedTuple):
    """Sequence n is in row rows[n] of a cache, after left_pad[n] tokens of padding."""

    rows: Tensor
    left_pad: Tensor
    lengths: Tensor
    longest: int

    @staticmethod
    def within(rows: Tensor | None, left_pad: Tensor | None, used: Tensor, longest: int) -> Cached:
        """`used` counts the padding too, and is at most `longest`."""
        rows = torch.arange(used.numel(), device=used.device) if rows is None else rows.long()
        used = used.long().clamp(0, longest)
        pad = (
            torch.zeros_like(used) if left_pad is None else torch.minimum(left_pad.long().clamp(min=0), used)
        )
        return Cached(rows, pad, used - pad, longest)

    def tiles(self, block: int) -> Tiles:
        return _in_rows(self.lengths, self.longest, block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        row, pad = tiles.of(self.rows, self.left_pad)
        return row, torch.where(tiles.tokens > 0, pad + tiles.start, 0)

    def largest_block(self) -> int | None:
        return None


class Paged(NamedTuple):
    """The pages of sequence n are table[n]; token t lies in page t // size, at t % size."""

    table: Tensor
    size: int
    lengths: Tensor

    @staticmethod
    def within(table: Tensor, size: int, used: Tensor) -> Paged:
        return Paged(table, size, used.long().clamp(0, table.size(1) * size))

    def tiles(self, block: int) -> Tiles:
        return _in_rows(self.lengths, self.table.size(1) * self.size, block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        count, pages = self.table.shape
        each = self.size // tiles.block
        tile = torch.arange(tiles.start.numel() // max(count, 1), dtype=torch.int32, device=self.table.device)
        row = (tile % each * tiles.block).expand(count, tile.numel())
        # There may be one tile too many.
        page = torch.nn.functional.pad(self.table, (0, 1))[:, (tile // each).clamp(max=pages)]
        return page.flatten(), row.flatten()

    def largest_block(self) -> int | None:
        return self.size


Places = Packed | Cached | Paged


def block_within(places: Places, block: int) -> int:
    """The most tokens, up to `block`, that a tile may have without lying in two pages."""
    most = places.largest_block()
    # A constant to torch.compile, which takes page sizes for numbers that change but not indices.
    return block if most is None else math.gcd(operator.index(most), block)
