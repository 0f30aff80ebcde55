"""What a case draws: whole numbers from a generator of its own, tensors from one pool of normal numbers."""

from __future__ import annotations

import functools
import math
import random

import torch
from torch import Tensor

from .suite import hashed

POOL = 4_194_301  # a prime: no tensor's rows repeat where it begins anew


@functools.cache
def _pool(dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return torch.randn(POOL, generator=torch.Generator().manual_seed(2026))
    return _pool(torch.float32).to(dtype)


class Numbers:
    """Those of one case, the same each time."""

    def __init__(self, case_id: str) -> None:
        self.whole = random.Random(hashed(case_id))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, magnitude: float = 1.0) -> Tensor:
        count, start = math.prod(shape), self.whole.randrange(POOL)
        pool, parts = _pool(dtype), []
        while count:
            parts.append(pool[start : start + count])
            count, start = count - parts[-1].numel(), 0
        flat = torch.cat(parts) if parts else pool[:0].clone()  # cat copies a single one too
        return (flat if magnitude == 1.0 else flat * magnitude).view(shape)

    def uniform(self, *shape: int, most: float) -> Tensor:
        return torch.tensor([self.whole.random() * most for _ in range(math.prod(shape))]).view(shape)

    def below(self, high: int, low: int = 0) -> int:
        """From `low` to `high`, without it."""
        return self.whole.randrange(low, high)
