"""Which versions of torch are served: those that were tested, and newer ones that pass a self-check.

Imported before any module that uses private functions of torch: a newer torch may lack them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

OLDEST, NEWEST = (2, 11), (2, 15)  # the first and the last that was tested
TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
UNTESTED = TORCH > NEWEST
_RANGE = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
_OLDER = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def check() -> None:
    """Refuse a torch that is too old; say once that one is newer than those tested."""
    if TORCH < OLDEST:
        raise ImportError(
            f"flex_inductor needs torch {_RANGE}, and found {torch.__version__}. Install another: {_OLDER}"
        )
    if UNTESTED:
        warnings.warn(
            f"flex_inductor was tested with torch {_RANGE}, not with {torch.__version__}. Its first calls are checked; "
            f"what fails there is refused. For a tested version: {_OLDER}",
            stacklevel=3,
        )


def refused(what: str, error: BaseException) -> str:
    """Why a call is refused with a torch that is newer than those tested."""
    while inner := getattr(error, "inner_exception", None):
        error = inner
    first_line = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f"flex_inductor was tested with torch {_RANGE}. With {torch.__version__} {what} fails: "
        f"{type(error).__name__}: {first_line}. Install a tested version ({_OLDER}) or a newer flex_inductor."
    )


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the package's own imports: names what an untested torch lacks."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if not UNTESTED:
            raise
        raise ImportError(refused("its import", error)) from error
