"""Which rank holds which tokens of a sequence."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`owner[t]` is the rank of tile t, which has the tokens t * tile to (t + 1) * tile. The last tile may be shorter.

    A rank holds its tiles in ascending order, so that a short last tile is last there too.
    """

    length: int
    tile: int
    ranks: int
    owner: tuple[int, ...]

    def __post_init__(self) -> None:
        tiles = -(-self.length // self.tile)
        if len(self.owner) != tiles or not all(0 <= rank < self.ranks for rank in self.owner):
            raise ValueError(
                f"Layout: owner: expected a rank from 0 to {self.ranks - 1} for each of {tiles} tiles, "
                f"got {len(self.owner)} entries from {min(self.owner, default=None)} to "
                f"{max(self.owner, default=None)}."
            )

    def tiles(self, rank: int) -> Tensor:
        """The tiles of this rank, int64, ascending. A trace knows their number."""
        return torch.nonzero_static(self._owners == rank, size=-(-self.lengths[rank] // self.tile)).squeeze(1)

    def positions(self, rank: int) -> Tensor:
        """Where each token of this rank is in the whole sequence, int32."""
        return self._tokens(self.tiles(rank))[: self.lengths[rank]].to(torch.int32)

    def tokens(self, tiles: Tensor) -> Tensor:
        """The tokens of these tiles, int32."""
        found = self._tokens(tiles)
        return found[found < self.length].to(torch.int32)

    def _tokens(self, tiles: Tensor) -> Tensor:
        return (tiles[:, None] * self.tile + torch.arange(self.tile)).flatten()

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        tokens = torch.bincount(self._owners, minlength=self.ranks) * self.tile
        if self.owner:
            tokens[self.owner[-1]] -= len(self.owner) * self.tile - self.length
        return tuple(tokens.tolist())

    def digest(self) -> str:
        """A hash that is the same for equal layouts in any process."""
        text = f"{self.length} {self.tile} {self.ranks} {self.owner}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def _owners(self) -> Tensor:
        return torch.tensor(self.owner, dtype=torch.int64)
