"""Masks from masks. The results are ordinary mask_mods.

causal        window        and_masks     or_masks      not_mask(causal)
#. . . .      ## . . .      #. . . .      ## . . .      . # # # #
## . . .      ### . .       ## . . .      ### . .       . . # # #
### . .       .###.         .## . .       ####.         . . . # #
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from ..errors import MaskArgumentError

__all__ = ["MaskMod", "and_masks", "not_mask", "offset", "or_masks"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Turn a mask around: True where it is False.

    Args:
        mask_mod: any mask_mod.

    Raises:
        MaskArgumentError: it is no function.

    Example:
        >>> later = flex_inductor.not_mask(masks.causal())
        >>> later(0, 0, 2, torch.arange(5)).int().tolist()
        [0, 0, 0, 1, 1]
    """
    _check_callable("not_mask", mask_mod)

    def inverted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~mask_mod(b, h, q_idx, kv_idx)

    return inverted


def offset(
    mask_mod: MaskMod, q: int | Tensor = 0, kv: int | Tensor = 0, b: int | Tensor = 0, h: int | Tensor = 0
) -> MaskMod:
    """See a mask from further on: index 0 becomes index `q`, and likewise for the others.

    Use it for the queries of a step behind a KV cache of `q` tokens.

    Args:
        mask_mod: any mask_mod.
        q: what is added to q_idx: an integer, or an integer tensor [] or [batch].
        kv: the same for kv_idx.
        b: what is added to b.
        h: what is added to h.

    Raises:
        MaskArgumentError: `mask_mod` is no function, or `q` or `kv` is a float tensor or has two dimensions.

    Example:
        >>> step = flex_inductor.offset(masks.causal(), q=3)  # the cache holds 3 tokens
        >>> step(0, 0, 0, torch.arange(6)).int().tolist()
        [1, 1, 1, 1, 0, 0]
    """
    _check_callable("offset", mask_mod)
    for name, value in (("q", q), ("kv", kv)):
        if isinstance(value, Tensor) and (value.dim() > 1 or value.is_floating_point()):
            raise MaskArgumentError(
                f"offset: {name}: expected an integer, or an integer tensor that is 0-d or has one entry for "
                f"each batch, got {value.dtype} of shape {tuple(value.shape)}."
            )

    def shift(index: Tensor, by: int | Tensor, batch: Tensor) -> Tensor:
        return index + (by[batch] if isinstance(by, Tensor) and by.dim() == 1 else by)

    def shifted(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b_idx + b, h_idx + h, shift(q_idx, q, b_idx), shift(kv_idx, kv, b_idx))

    return shifted


def _check_callable(name: str, mask_mod: Any) -> None:
    if not callable(mask_mod):
        raise MaskArgumentError(
            f"{name}: expected a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}. "
            "To combine block masks use intersect or unite."
        )
