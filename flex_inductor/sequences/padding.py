"""Between padded tensors and packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from . import errors


def unpad(padded: Tensor, mask: Tensor) -> Tensor:
    """The tokens [batch, length, ...] at which `mask` [batch, length] is True, one sequence after the other."""
    check_padding_mask(mask)
    if not isinstance(padded, Tensor) or padded.shape[:2] != mask.shape:
        raise errors.not_padded(padded, mask)
    return padded.flatten(0, 1)[mask.flatten().nonzero().squeeze(-1)]


def pad(packed: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """The reverse of `unpad`, with `value` where there is no token."""
    check_padding_mask(mask)
    places = mask.flatten().nonzero().squeeze(-1)
    if not isinstance(packed, Tensor) or packed.shape[:1] != places.shape:
        raise errors.not_packed(packed, places.numel())
    padded = packed.new_full((mask.numel(), *packed.shape[1:]), value)
    padded = padded.index_copy(0, places, packed)
    return padded.unflatten(0, mask.shape)


def check_padding_mask(mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        raise errors.padding_not_bool(mask)
