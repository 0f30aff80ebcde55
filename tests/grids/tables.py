"""All suites."""

from __future__ import annotations

import hashlib
import json

from . import flash_tables
from .suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (*flash_tables.FLASH_2, *flash_tables.FLASH_3, *flash_tables.FLASH_4)
}


def version() -> str:
    """Changes with any axis: numbers of cases mean something else then."""
    tables = [[s.name, s.kernel, {name: list(values) for name, values in s.axes.items()}] for s in SUITES.values()]
    return hashlib.blake2b(json.dumps(tables).encode(), digest_size=8).hexdigest()
