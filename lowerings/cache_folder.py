"""The folder of facts for later processes, and how files in it are written."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "flex_inductor"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file that replaces `path` once it is complete. If several processes do so, one complete file is left."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("x") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
