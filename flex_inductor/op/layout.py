"""Memory layouts of what the ops return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_like_layout(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An unfilled tensor whose dimensions lie in memory in `like`'s order, the last one innermost."""
    strides = like.stride()
    order = sorted(range(like.dim() - 1), key=lambda dim: -strides[dim])
    if any(strides[dim] == 0 for dim in order):
        order = list(range(like.dim() - 1))
    new_strides = [1] * like.dim()
    step = shape[-1]
    for dim in reversed(order):
        new_strides[dim] = step
        step = step * shape[dim]
    return torch.empty_strided(tuple(shape), new_strides, dtype=dtype or like.dtype, device=like.device)
