"""Which of a bench's cases to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

Case = TypeVar("Case")


def selected(
    cases: Sequence[Case], only: str | None, title: Callable[[Case], str] = attrgetter("title")
) -> list[Case]:
    """Those whose title contains `only`. If there is none, stderr names all."""
    found = [case for case in cases if not only or only in title(case)]
    if not found:
        titles = "\n  ".join(map(title, cases))
        print(f"no case contains {only!r}; there are\n  {titles}", file=sys.stderr)
    return found
