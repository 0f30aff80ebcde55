"""All suites."""

from __future__ import annotations

import hashlib
import json

from .cudnn_tables import CUDNN
from .flash_tables import FLASH_2, FLASH_3, FLASH_4
from .flex_tables import FLASH_4_MODS, TORCH
from .suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (*FLASH_2, *FLASH_3, *FLASH_4, *FLASH_4_MODS, *TORCH, *CUDNN)
}


def version() -> str:
    """Changes with any axis: numbers of cases mean something else then."""
    tables = [
        [s.name, s.kernel, {name: list(values) for name, values in s.axes.items()}] for s in SUITES.values()
    ]
    return hashlib.blake2b(json.dumps(tables).encode(), digest_size=8).hexdigest()
