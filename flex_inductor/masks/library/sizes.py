"""What sizes masks take."""

from __future__ import annotations

from ..errors import MaskArgumentError


def positive(function: str, **sizes: int) -> None:
    """Refuse sizes that are no positive integers."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise MaskArgumentError(f"{function}: {name}: expected an integer of at least 1, got {size!r}.")
