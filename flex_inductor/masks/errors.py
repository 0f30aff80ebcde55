"""What can be wrong with a request for a block mask, in the user's words."""

from __future__ import annotations

__all__ = ["FlexError", "MaskArgumentError", "MaskModError"]


class FlexError(Exception):
    """Base of every error this package raises on purpose."""


class MaskArgumentError(FlexError, ValueError):
    """An argument of a mask function has a value that cannot be served."""


class MaskModError(FlexError, TypeError):
    """The mask_mod itself is not a function of (b, h, q_idx, kv_idx) to one boolean."""
