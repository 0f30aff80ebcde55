"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases, of which `make test` runs those that are quick."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
