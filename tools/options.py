"""What arguments of commands may be, checked before the work begins."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .users_code import Refused

MOST = 2**31 - 1  # of what is counted, as indices are int32


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
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {MOST}, got {text!r}.")
    return int(text)


def above_zero(text: str) -> float:
    """The type of an argument that is a rate or an amount."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}.")
    return number


def count(default: int, what: str = "") -> dict[str, Any]:
    """An option that counts, as `add_argument` takes it."""
    help = f"{what} (default {default})".strip()
    return {"type": at_least_one, "default": default, "metavar": "N", "help": help}


def file(what: str) -> dict[str, Any]:
    """An option that names a file to be written."""
    return {"type": to_write, "metavar": "FILE", "help": what}


def add(parser: Any, options: dict[str, dict[str, Any]]) -> None:
    """Arguments by name, each with what `add_argument` takes."""
    for name, given in options.items():
        parser.add_argument(name, **given)


def pairs(
    what: str, given: Sequence[str], known: Mapping[str, Callable[[str], Any]], expected: str
) -> dict[str, Any]:
    """Arguments key=value, each read by its key's function."""
    found = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            found[key] = known[key](value)
        except (KeyError, ValueError):
            raise Refused(f"{what}: expected {expected}; got {text!r}") from None
    return found
