"""A call with a map of tiles as plain calls in float64: one for each sequence, with what its queries visit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mod_ir.arguments import INDEX_DTYPE
from ..op.call import Inputs
from ..visits import Bounds
from ..visits.places import BATCH, COUNT, HEAD, INDEX, ROW, SEQUENCE
from .exact import Exact
from .lanes import Visited
from .mods import Mod


class Side(NamedTuple):
    """The tokens of a sequence's tiles, one tile after the other: an entry for each token."""

    batch: Tensor
    row: Tensor
    position: Tensor  # that mods see
    tile: Tensor

    @staticmethod
    def of(lines: Tensor, tiles: Tensor) -> Side:
        counts = lines[tiles, COUNT].long()
        tile = tiles.repeat_interleave(counts)
        place = torch.arange(tile.numel(), device=tile.device) - (
            counts.cumsum(0) - counts
        ).repeat_interleave(counts)
        batch, row, position = (lines[tile, column].long() for column in (BATCH, ROW, INDEX))
        return Side(batch, row + place, position + place, tile)

    def taken(self, tensor: Tensor) -> Tensor:
        """The rows of [B, H, rows, ...] as [1, H, tokens, ...]."""
        return tensor[self.batch, :, self.row].transpose(0, 1).unsqueeze(0)


class OneSequence(Exact):
    """The tiles of queries with one sequence and one first head, and those of keys that they visit."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        inputs: Inputs,
        queries: Tensor,
        score_mod: Mod | None,
        mask_mod: Mod | None,
        scale: float,
    ):
        query, key, value = tensors
        tile_map: Any = inputs.tile_map
        schedule: Any = inputs.schedule
        self.of_tiles = None  # [H or 1, tiles of queries, tiles of keys]
        if isinstance(schedule, Bounds):  # all keys of the sequence that mask_mod lets through
            keys = (tile_map.keys[:, SEQUENCE] == tile_map.queries[queries[0], SEQUENCE]).nonzero().flatten()
        else:
            visited = Visited(schedule, len(tile_map.keys), query.device)
            self.of_tiles = visited.blocks(slice(0, 1), slice(0, visited.grids[1]), queries.tolist())[0]
            keys = self.of_tiles.flatten(0, 1).any(0).nonzero().flatten()
        self.queries, self.keys = Side.of(tile_map.queries, queries), Side.of(tile_map.keys, keys)
        self.line_of_tile = torch.zeros(len(tile_map.queries), dtype=torch.long, device=query.device)
        self.line_of_tile[queries] = torch.arange(len(queries), device=query.device)
        self.sequence, self.head = (int(tile_map.queries[queries[0], column]) for column in (SEQUENCE, HEAD))
        taken = (self.queries.taken(query), self.keys.taken(key), self.keys.taken(value))
        super().__init__(*taken, None, score_mod, mask_mod, scale, inputs.sinks, inputs.dropout)

    @property
    def lanes(self) -> int:
        return torch.Size(self.sizes.values()).numel()

    def indices(self, tile: Any) -> dict[str, Tensor]:
        found = super().indices(tile)
        return {
            "b": found["b"] + self.sequence,
            "h": found["h"] + self.head,
            "q_idx": self.queries.position[tile.m].to(INDEX_DTYPE),
            "kv_idx": self.keys.position[tile.n].to(INDEX_DTYPE),
        }

    def live(self, tile: Any) -> Tensor:
        if self.of_tiles is None:
            return self.allowed(tile, None)
        kinds = self.of_tiles if self.of_tiles.size(0) == 1 else self.of_tiles[tile.h]
        lines = self.line_of_tile[self.queries.tile[tile.m]]
        kinds = kinds[:, lines][:, :, self.keys.tile[tile.n]].unsqueeze(0)
        return self.allowed(tile, (kinds > 0, kinds == Visited.FULL))


def groups_of(lines: Tensor) -> list[Tensor]:
    """The tiles of queries that have tokens, those of one sequence and one first head together."""
    used = (lines[:, COUNT] > 0).nonzero().flatten()
    of_tile = lines[used][:, [SEQUENCE, HEAD]]
    _, group = of_tile.unique(dim=0, return_inverse=True)
    return [used[group == i] for i in range(int(group.max()) + 1 if used.numel() else 0)]
