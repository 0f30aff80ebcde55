"""Some rows of queries against all KV blocks as flags."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class Band:
    """The rows `m` of a call, for tiles of other sizes than blocks. Flags are [B or 1, H or 1, rows, columns]."""

    def __init__(self, q_block: int, kv_block: int, m: slice, partial: Tensor, full: Tensor):
        self.q_block, self.kv_block, self.m = q_block, kv_block, m
        self.visited, self.full = partial | full, full
        self._visited_on_host, self._full_on_host = self.visited.cpu(), self.full.cpu()

    def key_tiles(self, keys: int, step: int) -> Iterator[slice]:
        """The tiles of `step` keys in which any block is visited."""
        columns = self.visited.size(-1)
        seen = torch.nn.functional.pad(self._visited_on_host.flatten(0, -2).any(0).cumsum(0), (1, 0))
        start = torch.arange(0, keys, step)
        first = (start // self.kv_block).clamp(max=columns)
        last = ((start + step).clamp(max=keys) + self.kv_block - 1) // self.kv_block
        for at in start[seen[last.clamp(max=columns)] > seen[first]].tolist():
            yield slice(at, min(at + step, keys))

    def visits_all(self, n: slice) -> bool:
        return bool(self._visited_on_host[..., blocks_of(n, self.kv_block)].all())

    def all_full(self, n: slice) -> bool:
        return bool(self._full_on_host[..., blocks_of(n, self.kv_block)].all())

    def lanes(self, n: slice) -> tuple[Tensor, Tensor]:
        """Flags for each lane of the rows and the keys `n`: in a visited block, and in a full one."""
        return self._lanes(self.visited, n), self._lanes(self.full, n)

    def _lanes(self, flags: Tensor, n: slice) -> Tensor:
        blocks = flags[..., blocks_of(n, self.kv_block)]
        rows, columns = blocks.shape[2:]
        lanes = blocks[..., :, None, :, None].expand(-1, -1, -1, self.q_block, -1, self.kv_block)
        lanes = lanes.reshape(*blocks.shape[:2], rows * self.q_block, columns * self.kv_block)
        first_row, first_column = self.m.start % self.q_block, n.start % self.kv_block
        return lanes.narrow(2, first_row, self.m.stop - self.m.start).narrow(
            3, first_column, n.stop - n.start
        )


def blocks_of(tokens: slice, block: int) -> slice:
    """The blocks that hold these tokens."""
    return slice(tokens.start // block, -(-tokens.stop // block))


def part_of(tensor: Tensor, b: slice, h: slice) -> Tensor:
    """The batches and heads that a tile is about; a dimension of size 1 stands for all."""
    tensor = tensor if tensor.size(0) == 1 else tensor[b]
    return tensor if tensor.size(1) == 1 else tensor[:, h]
