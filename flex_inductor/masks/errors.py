"""What can be wrong with a request for a block mask, in the user's words."""

from __future__ import annotations

from ..errors import FlexError, FlexTypeError, FlexValueError

__all__ = ["FlexError", "MaskArgumentError", "MaskModError"]


class MaskArgumentError(FlexValueError):
    """An argument of a mask function has a value that cannot be served."""


class MaskModError(FlexTypeError):
    """The mask_mod itself is not a function of (b, h, q_idx, kv_idx) to one boolean."""
