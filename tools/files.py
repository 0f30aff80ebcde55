"""Files that commands write, checked before the work begins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def to_write(name: str) -> str:
    """The type of an argument that names a file to be written."""
    path = Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a file in a folder that is there, got {name!r}, and there is no folder {str(path.parent)!r}. "
            "Make the folder first, or name another."
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a file, got {name!r}, which is a folder.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {name!r}, which cannot.")
    return name


def at_least_one(text: str) -> int:
    """The type of an argument that counts something there must be."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}.")
    return int(text)
