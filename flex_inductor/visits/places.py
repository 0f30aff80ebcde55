"""Where the tiles of a call lie in its tensors, and which indices mods see there.

A plain call has no map: tile t of a batch begins at row t * block, and mods see batch and row. Packed sequences, pages,
shards of a longer sequence and permuted ones have a map. The kernels are otherwise the same, and mods see (sequence,
head, position, position) in every case.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The columns of a map, one line for each tile.
BATCH = 0  # of the tensor in which the tile lies
ROW = 1  # of that batch where it begins
SEQUENCE = 2  # what mods see as b
HEAD = 3  # added to the head that mods see as h
INDEX = 4  # what mods see as q_idx or kv_idx in the tile's first row; it counts up from there
COUNT = 5  # rows that belong to the tile, from the first on
COLUMNS = 6

PIECE = 128  # scattered keys that a kernel may take at once


class TileMap(NamedTuple):
    """int32 [tiles, COLUMNS] for queries and for keys: the lines and the columns of the call's schedule.

    - The schedule is one of runs, or of bounds with a table of sequences. Its batch dimension is 1.
    - A tile of keys has the sequence and the head of every tile of queries that visits it.
    - Rows of the output in no tile are 0, with a logsumexp of -inf.
    - Only positions of queries may be negative.
    - A row of memory is in at most one tile. Sequences may share keys and values that need no gradient.
    - The tiles of a run follow each other, in memory and in the indices that mods see. Only its last tile may have
      fewer rows than a block. The tiles of a full run have all their rows, and so has the tile that visits it.
    - Where the call's keys are scattered, as in pages, their tiles may lie anywhere. A full run then has a multiple of
      `PIECE` keys, whatever the block.
    """

    queries: Tensor
    keys: Tensor
