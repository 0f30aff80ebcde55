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
    """True where it is not."""
    _check_callable("not_mask", mask_mod)

    def inverted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~mask_mod(b, h, q_idx, kv_idx)

    return inverted


def offset(
    mask_mod: MaskMod, q: int | Tensor = 0, kv: int | Tensor = 0, b: int | Tensor = 0, h: int | Tensor = 0
) -> MaskMod:
    """`mask_mod` as seen from further on: index 0 becomes index `q` (and likewise for the others).

    A KV cache that already holds n tokens sees its next queries through `offset(mask, q=n)`. `q` and `kv`
    may also be tensors: 0-d, or with one entry for each batch.
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
