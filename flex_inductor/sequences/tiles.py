"""The tiles of packed sequences: each begins where a sequence does, or a whole number of tiles further on.

Nothing here is read on the host, and no shape depends on values: there are as many lines as tiles may ever be needed,
and those that are not have no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiles(NamedTuple):
    """One side of a call, an entry for each tile."""

    block: int
    sequence: Tensor  # the number of sequences where the tile is not needed
    start: Tensor  # its first token, counted within the sequence
    tokens: Tensor  # how many it has
    first: Tensor  # for each sequence, its first tile; and the number of tiles that are needed
    row: Tensor  # where the tile lies among all tokens

    @property
    def needed(self) -> Tensor:
        return self.tokens > 0

    def of(self, by_sequence: Tensor) -> Tensor:
        """For each tile what its sequence has; 0 where the tile is not needed."""
        return torch.nn.functional.pad(by_sequence, (0, 1))[self.sequence]

    def lines(self, shift: Tensor | int) -> Tensor:
        """The lines of a tile map, whose indices are positions in the sequence plus `shift`."""
        zero = torch.zeros_like(self.row)
        columns = [zero, self.row, self.sequence, zero, self.start + shift, self.tokens]
        return torch.where(self.needed[:, None], torch.stack(columns, 1), 0).to(torch.int32)


def tiles_of(offsets: Tensor, lengths: Tensor, total: int, block: int) -> Tiles:
    """The tiles of sequences that begin at `offsets` and have `lengths`, of at most `total` tokens in all."""
    offsets, lengths = offsets.long(), lengths.long()
    sequences = lengths.numel()
    tiles = (lengths + (block - 1)) // block
    first = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    # Two at least: torch compiles what has one of something by itself.
    at = torch.arange(max(total // block + sequences, 2), device=offsets.device)
    sequence = torch.searchsorted(first[1:], at, right=True)
    padded = [torch.nn.functional.pad(x, (0, 1)) for x in (offsets[:-1], lengths)]
    start = (at - first[sequence]) * block
    tokens = (padded[1][sequence] - start).clamp(min=0, max=block)
    row = padded[0][sequence] + start
    # Values that have changed since may not lead out of the tensors.
    tokens = torch.where(row >= 0, torch.minimum(tokens, total - row), 0).clamp(min=0)
    return Tiles(block, sequence, start, tokens, first, row)
