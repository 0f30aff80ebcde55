"""Between padded tensors and packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from . import errors


def unpad(padded: Tensor, mask: Tensor) -> Tensor:
    """Take the tokens at which `mask` is True, one sequence after the other.

    Args:
        padded: [batch, length, ...].
        mask: bool [batch, length], on the same device.

    Returns:
        Tensor: [tokens, ...].

    Raises:
        FlexTypeError: `mask` is not bool [batch, length], or `padded` has another shape.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, False, False]])
        >>> flex_inductor.unpad(torch.arange(6).view(2, 3), mask)
        tensor([0, 1, 3])
    """
    check_padding_mask(mask)
    if not isinstance(padded, Tensor) or padded.shape[:2] != mask.shape:
        raise errors.not_padded(padded, mask)
    return padded.flatten(0, 1)[mask.flatten().nonzero().squeeze(-1)]


def pad(packed: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Undo `unpad`.

    Args:
        packed: [tokens, ...], as many as `mask` has True.
        mask: bool [batch, length].
        value: where there is no token.

    Returns:
        Tensor: [batch, length, ...].

    Raises:
        FlexTypeError: `mask` is not bool [batch, length], or `packed` has another number of tokens.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, False, False]])
        >>> flex_inductor.pad(torch.tensor([1, 2, 3]), mask, value=-1)
        tensor([[ 1,  2, -1],
                [ 3, -1, -1]])
    """
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
