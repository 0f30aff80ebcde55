"""Numbers in float64 with how far from them right ones may be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERATIONS = 8  # roundings of a mod, of exp and of the operations around it


class Bounded(NamedTuple):
    value: Tensor
    error: Tensor  # how far from `value` a right result may be

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """The same after rounding to `dtype`."""
        if not dtype.is_floating_point:
            return self
        finfo = torch.finfo(dtype)
        return self._replace(
            error=self.error + 0.6 * finfo.eps * size_of(self.value) + finfo.tiny * finfo.eps
        )


class Scores(NamedTuple):
    """A tile of scores: [b, h, m, n]."""

    live: Tensor
    raw: Tensor  # before score_mod
    off: Tensor  # by how much they may be off
    value: Tensor
    low: Tensor
    high: Tensor

    @property
    def error(self) -> Tensor:
        """By how much `value` may be off."""
        return torch.maximum(self.high - self.value, self.value - self.low).nan_to_num(0.0)


def finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def size_of(tensor: Tensor) -> Tensor:
    """Magnitudes, 0 for numbers that are not finite: bounds do not cover those."""
    return tensor.abs().nan_to_num(0.0, 0.0, 0.0)
