"""Query heads that share a KV head in one tile, where queries are few."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import AttentionProblem
from .configs import Device, Shape, candidates, decode_cost, misfit
from .tables import DECODE

MOST_QUERIES = 64  # of one head in a tile
MOST_ROWS = 128  # of several heads


class Packed(NamedTuple):
    heads: int
    rows: int  # of the tile: a power of two


def packed(problem: AttentionProblem, shape: Shape, device: Device) -> Packed:
    """The most heads of a group for which there is a config, if they visit the same keys."""
    queries = queries_of(problem) if few(problem) else 1
    group = int(problem.H) // int(problem.K) if problem.heads_alike else 1
    for heads in range(group, 1, -1):
        tile = Packed(heads, _rows(heads * queries))
        if group % heads == 0 and heads * queries <= MOST_ROWS and _fits(shape, tile, device):
            return tile
    return Packed(1, _rows(queries))


def few(problem: AttentionProblem) -> bool:
    """Whether one tile holds all queries of a head, for every length that the graph serves."""
    known = problem.map_tiles is not None or getattr(problem.M, "is_number", True)
    return known and queries_of(problem) <= MOST_QUERIES


def queries_of(problem: AttentionProblem) -> int:
    """The queries of a head, or of a map's tile."""
    return int(problem.M) if problem.map_tiles is None else problem.blocks[0]


def _rows(queries: int) -> int:
    return max(16, 1 << (queries - 1).bit_length())


def _fits(shape: Shape, tile: Packed, device: Device) -> bool:
    shape = shape._replace(rows=tile.rows)
    (first, *_), _ = candidates(DECODE, decode_cost, device, shape)
    return misfit(first, decode_cost, device, shape) is None
