"""What can be wrong with a request for a block mask, in the user's words."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import FlexError, FlexTypeError, FlexValueError

__all__ = ["FlexError", "MaskArgumentError", "MaskModError", "made_of_examples", "size_needed"]


class MaskArgumentError(FlexValueError):
    """An argument of a mask function has a value that cannot be served."""


class MaskModError(FlexTypeError):
    """The mask_mod itself is not a function of (b, h, q_idx, kv_idx) to one boolean."""


def size_needed(mask_mod: str, read: Sequence[str]) -> MaskArgumentError:
    """`read` are those of b and h that the mask reads without a size for them."""
    names, indices = (" and ".join(words) for words in ([name.upper() for name in read], read))
    what = " and ".join({"b": "batches", "h": "heads"}[name] for name in read)
    return MaskArgumentError(
        f"{names}: got None, but mask_mod {mask_mod} reads {indices}. Pass the number of {what}; "
        f"with 1, all of them visit the tiles of the first."
    )


def made_of_examples() -> MaskArgumentError:
    return MaskArgumentError(
        "a mask made inside of torch.func.vmap depends on a tensor that differs between the examples, which would need "
        "a mask for each. Make one outside, with a batch for each example and a mask_mod that reads b, and call "
        "attention on the whole batch."
    )
