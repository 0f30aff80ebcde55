"""Rewrites other ways to look values up, such as index_select, as indexing.

Only indexing is guarded: a lane that is not live may hold an index that is out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def as_indexing(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """What `func` returns, if it looks values up by a tensor of indices, else None."""
    lookup = _LOOKUPS.get(func)
    return None if lookup is None else lookup(*args, **kwargs)


def _rows(input: Tensor, index: Tensor) -> Tensor:
    """input[index]. A single index stays a 0-d tensor, which has the simplest gradient."""
    if index.numel() != 1:
        return aten.index.Tensor(input, [index])
    return aten.index.Tensor(input, [index.reshape(())]).reshape((*index.shape, *input.shape[1:]))


def _take(input: Tensor, index: Tensor) -> Tensor:
    return _rows(input.reshape(-1), index)


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return _rows(input.movedim(dim, 0), index.reshape(-1)).movedim(0, dim)


def _gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if input.dim() <= 1:
        return _rows(input.reshape(-1), index)
    positions = [torch.arange(size, device=index.device) for size in index.shape]
    grid = list(torch.meshgrid(*positions, indexing="ij"))
    grid[dim] = index
    return aten.index.Tensor(input, grid)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    return _torch_embedding(weight, input, -1 if padding_idx is None else padding_idx % weight.size(0))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if scale_grad_by_freq:
        return None
    found = _rows(weight, indices)
    if padding_idx < 0:
        return found
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)


_LOOKUPS: dict[Callable, Callable[..., Tensor | None]] = {
    torch.take: _take,
    Tensor.take: _take,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    torch.gather: _gather,
    Tensor.gather: _gather,
    torch.nn.functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
}
