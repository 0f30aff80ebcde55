"""A schedule as numbers and pictures: how much is visited, where, and the tokens of single tiles."""

from __future__ import annotations

import math
from typing import Any

import torch

from flex_inductor.masks import RunSchedule
from flex_inductor.masks.draw import tile_shares, tile_tokens
from flex_inductor.masks.runs import FULL, PARTIAL, to_grid

MOST_PATTERNS = 256  # different partial tiles whose tokens a web page holds


class MaskFacts:
    """Of all heads and batches that the schedule tells apart; the picture is of the first."""

    def __init__(self, schedule: RunSchedule, has_mod: bool):
        self.schedule, self.has_mod = schedule, has_mod
        self.shape, self.block = schedule.seq_lengths, schedule.BLOCK_SIZE  # of queries and keys
        self.grids = schedule.grids  # batches and heads with tiles of their own
        runs = schedule.row_runs()
        tiles = runs.stop - runs.start
        self.full, self.partial = (int(tiles[runs.kind == kind].sum()) for kind in (FULL, PARTIAL))
        self.tiles = math.prod((*self.grids, *schedule.extent.tiles))
        self.empty = self.tiles - self.full - self.partial
        self.sparsity = schedule.sparsity()  # percent
        self.picture = schedule.picture(16)

    def __str__(self) -> str:
        of = "" if self.grids == (1, 1) else f" over {self.grids[0]} x {self.grids[1]} grids"
        return (
            f"{self.shape[0]} x {self.shape[1]} in tiles of {self.block[0]} x {self.block[1]}{of}: {self.full} full, "
            f"{self.partial} partial, {self.empty} empty of {self.tiles}; sparsity {self.sparsity:.1f}%"
        )

    def to_dict(self) -> dict[str, Any]:
        names = ("shape", "block", "grids", "full", "partial", "empty", "sparsity", "picture")
        return {name: getattr(self, name) for name in names}

    def drawing(self) -> dict[str, Any]:
        """What a web page draws: the share of partial and full tiles in each cell, and the tokens of tiles.

        Tokens of a tile are runs [start, stop) of live keys, row by row, as "0-3,5-8;0-4;...", empty where
        a row has none. Where a cell is more than one tile there are none.
        """
        partial, full = tile_shares(self.schedule)
        shares = torch.stack([full, partial], -1)
        return {
            "shape": self.shape,
            "block": self.block,
            "cells": [[[round(share, 3) for share in cell] for cell in row] for row in shares.tolist()],
            **self._tokens(tuple(full.shape) == self.schedule.extent.tiles),
        }

    def _tokens(self, one_tile_a_cell: bool) -> dict[str, Any]:
        if not (one_tile_a_cell and self.has_mod):
            return {"patterns": [], "tiles": {}}
        rows, _ = self.schedule.extent.tiles
        grid = to_grid(self.schedule.row_runs())[:rows]
        patterns: dict[str, int] = {}
        tiles = {}
        for row, column in (grid == PARTIAL).nonzero().tolist():
            if len(patterns) == MOST_PATTERNS:
                break
            tokens, _ = tile_tokens(self.schedule, 0, 0, (row, column))
            tiles[f"{row},{column}"] = patterns.setdefault(_runs_of(tokens.tolist()), len(patterns))
        return {"patterns": list(patterns), "tiles": tiles}


def _runs_of(rows: list[list[bool]]) -> str:
    """The runs of each row, as `drawing` says."""
    lines = []
    for row in rows:
        edges = torch.tensor([False, *row, False]).int().diff().nonzero().flatten().tolist()
        lines.append(",".join(f"{a}-{b}" for a, b in zip(edges[::2], edges[1::2], strict=True)))
    return ";".join(lines)
