"""What to visit, as data: torch's block lists, in the form the ops carry and the chunked route reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BlockLists(NamedTuple):
    """The part of a BlockMask that says what to visit, as the ops' `schedule` argument.

    Lists are [B or 1, H or 1, rows] counts and [B or 1, H or 1, rows, columns] indices, once for each
    row of query blocks (`kv_*`) and once for each column of KV blocks (`q_*`, absent when the mask
    was made without them). `full_*` blocks need no mask_mod.
    """

    q_block: int
    kv_block: int
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None

    @staticmethod
    def of(schedule: Sequence[Any]) -> BlockLists | None:
        return BlockLists(*schedule) if schedule else None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(self[2:])


class BlockMap:
    """BlockLists as dense flags, one for each block, for walking tiles of other sizes."""

    def __init__(self, lists: BlockLists):
        self.q_block, self.kv_block = lists.q_block, lists.kv_block
        self.visited = _dense(lists.kv_num_blocks, lists.kv_indices)
        if lists.full_kv_num_blocks is None:
            self.full = torch.zeros_like(self.visited)
        else:
            self.full = _dense(lists.full_kv_num_blocks, lists.full_kv_indices)
            self.visited = self.visited | self.full
        self._visited_on_host, self._full_on_host = self.visited.cpu(), self.full.cpu()

    def visits_any(self, b: slice, h: slice, m: slice, n: slice) -> bool:
        """Whether any block in the tile is visited."""
        return bool(self._blocks(self._visited_on_host, b, h, m, n).any())

    def visits_all(self, b: slice, h: slice, m: slice, n: slice) -> bool:
        return bool(self._blocks(self._visited_on_host, b, h, m, n).all())

    def all_full(self, b: slice, h: slice, m: slice, n: slice) -> bool:
        return bool(self._blocks(self._full_on_host, b, h, m, n).all())

    def lanes(self, b: slice, h: slice, m: slice, n: slice) -> tuple[Tensor, Tensor]:
        """Flags for each lane of a tile: in a visited block, and in a full one."""
        return self._lanes(self.visited, b, h, m, n), self._lanes(self.full, b, h, m, n)

    def _blocks(self, flags: Tensor, b: slice, h: slice, m: slice, n: slice) -> Tensor:
        return _broadcast(flags, b, h)[
            ...,
            m.start // self.q_block : -(-m.stop // self.q_block),
            n.start // self.kv_block : -(-n.stop // self.kv_block),
        ]

    def _lanes(self, flags: Tensor, b: slice, h: slice, m: slice, n: slice) -> Tensor:
        blocks = self._blocks(flags, b, h, m, n)
        rows, columns = blocks.shape[2:]
        lanes = blocks[..., :, None, :, None].expand(-1, -1, -1, self.q_block, -1, self.kv_block)
        lanes = lanes.reshape(*blocks.shape[:2], rows * self.q_block, columns * self.kv_block)
        first_row, first_column = m.start % self.q_block, n.start % self.kv_block
        return lanes.narrow(2, first_row, m.stop - m.start).narrow(3, first_column, n.stop - n.start)


def _broadcast(flags: Tensor, b: slice, h: slice) -> Tensor:
    flags = flags if flags.size(0) == 1 else flags[b]
    return flags if flags.size(1) == 1 else flags[:, h]


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    """Flags [B, H, rows, columns] from the first `counts` entries of each index row."""
    columns = indices.size(-1)
    listed = torch.arange(columns, device=indices.device) < counts.unsqueeze(-1)
    # Entries past the count are not meaningful: they go to a spare column.
    target = torch.where(listed, indices, columns).to(torch.int64)
    flags = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return flags.scatter_(-1, target, True)[..., :columns]
