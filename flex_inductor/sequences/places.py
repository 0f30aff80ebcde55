"""Where the tokens of sequences lie: packed one after the other, in the rows of a cache, or in pages.

Nothing here is read on the host, and no shape depends on values. Values that were copied into the tensors since they
were checked may be anything: what they say is cut to what there is room for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """One side of a call, an entry for each tile; each begins at its sequence's first token or whole tiles further on.

    There are as many as may ever be needed; those that are not have no tokens.
    """

    block: int
    sequence: Tensor  # the number of sequences where the tile is not needed
    start: Tensor  # its first token, counted within the sequence
    tokens: Tensor  # how many it has
    first: Tensor  # for each sequence, its first tile; and the number of tiles that are needed

    @property
    def needed(self) -> Tensor:
        return self.tokens > 0

    def of(self, by_sequence: Tensor) -> Tensor:
        """For each tile what its sequence has; 0 where the tile is not needed."""
        return torch.nn.functional.pad(by_sequence, (0, 1))[self.sequence]

    def lines(self, places: Places, shift: Tensor | int) -> Tensor:
        """The lines of a tile map, whose indices are positions in the sequence plus `shift`."""
        batch, row = places.at(self)
        zero = torch.zeros_like(row)
        columns = [batch, row, self.sequence, zero, self.start + shift, self.tokens]
        return torch.where(self.needed[:, None], torch.stack(columns, 1), 0).to(torch.int32)


def _tiles(lengths: Tensor, most: int, block: int) -> Tiles:
    tiles = (lengths + (block - 1)) // block
    first = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    # Two at least: torch compiles what has one of something by itself.
    at = torch.arange(max(most, 2), device=lengths.device)
    sequence = torch.searchsorted(first[1:], at, right=True)
    start = (at - first[sequence]) * block
    tokens = (torch.nn.functional.pad(lengths, (0, 1))[sequence] - start).clamp(min=0, max=block)
    return Tiles(block, sequence, start, tokens, first)


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
        return _tiles(self.lengths, self.total // block + self.lengths.numel(), block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """The batch and the row in which each tile begins."""
        return torch.zeros_like(tiles.start), tiles.of(self.starts) + tiles.start

    def largest_block(self) -> int | None:
        """A tile has at most so many tokens; None for any number."""
        return None


class Cached(NamedTuple):
    """Sequence n in the row rows[n] of a cache, after left_pad[n] tokens that are none of its own."""

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
        return _tiles(self.lengths, self.lengths.numel() * -(-self.longest // block), block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        return tiles.of(self.rows), tiles.of(self.left_pad) + tiles.start

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
        return _tiles(self.lengths, self.table.numel() * (self.size // block), block)

    def at(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        table = torch.nn.functional.pad(
            self.table, (0, 1, 0, 1)
        ).long()  # tiles that are not needed look there
        page = (tiles.start // self.size).clamp(0, self.table.size(1))
        return table[tiles.sequence, page], tiles.start % self.size

    def largest_block(self) -> int | None:
        return self.size


Places = Packed | Cached | Paged


def block_within(places: Places, block: int) -> int:
    """The most tokens up to `block` that a tile may have, so that none lies in two pages."""
    most = places.largest_block()
    return block if most is None else math.gcd(most, block)
