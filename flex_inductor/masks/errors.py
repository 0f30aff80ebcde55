"""What can be wrong with a request for a block mask, in the user's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FlexError, FlexTypeError, FlexValueError, kind_of

__all__ = ["FlexError", "MaskArgumentError", "MaskModError"]


class MaskArgumentError(FlexValueError):
    """An argument of a mask function has a value that cannot be served.

    Example:
        >>> try:
        ...     masks.sliding_window(0)
        ... except flex_inductor.FlexError as error:
        ...     print(error)
        sliding_window: size: expected an integer of at least 1, got 0.
    """


class MaskModError(FlexTypeError):
    """The mask_mod cannot be evaluated for all (b, h, q_idx, kv_idx).

    Example:
        >>> ids = torch.zeros(4, dtype=torch.int64)
        >>> try:
        ...     create_block_mask(lambda b, h, q, kv: ids[kv] == 0, None, None, 8, 8)
        ... except flex_inductor.masks.errors.MaskModError as error:
        ...     print(str(error).rpartition(". ")[2])
        A captured tensor needs an entry for every index it is read at.
    """


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


def capture_elsewhere(mask_mod: str, capture: str, device: Any, expected: Any) -> MaskModError:
    return MaskModError(
        f"{mask_mod}: captures `{capture}`, which is on {device}, but the mask is built on {expected}. Move it there, "
        f"or pass device={str(device)!r}."
    )


def not_drawable(mask: Any) -> FlexTypeError:
    return FlexTypeError(
        f"draw_mask: mask: expected a mask_mod, a BlockMask or a RunSchedule, got {kind_of(mask)}. Pass a mask_mod "
        "with Q_LEN and KV_LEN."
    )


def cannot_be_evaluated(mask_mod: str, error: Exception) -> MaskModError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return MaskModError(f"{mask_mod}: cannot be evaluated: {reason}")


def fails_somewhere(mask_mod: str, sizes: Mapping[str, int], error: Exception) -> MaskModError:
    where = ", ".join(f"{name} < {size}" for name, size in sizes.items())
    return MaskModError(
        f"mask_mod {mask_mod}: fails at some {where}: {error}. "
        "A captured tensor needs an entry for every index it is read at."
    )
