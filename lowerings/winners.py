"""The configs that were fastest when timed, kept across processes in a small JSON file each."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from flex_inductor import fingerprint

from . import cache_folder, errors
from .cache_folder import replacing

_FORMAT = 1


class Winner(NamedTuple):
    """The kernel and device of a timing, the config that won, and how long each took."""

    problem: str  # the class of problems, in a line
    device: str
    build: str  # of the code that renders the kernel
    config: dict[str, int]
    times_ms: list[tuple[dict[str, int], float]]


def folder() -> Path:
    return cache_folder.folder() / "tuned"


def find(problem: str, device: str) -> Winner | None:
    """The winner for this class of problems on this device, if it was timed with this build."""
    return _load(_path(problem, device, fingerprint.FINGERPRINT))


def keep(winner: Winner) -> None:
    """Write one winner."""
    path = _path(winner.problem, winner.device, winner.build)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            json.dump(winner._asdict(), file, indent=1)
    except OSError as error:
        warnings.warn(f"the tuning result cannot be kept: {error}", stacklevel=2)


def export(path: Path) -> int:
    """Write all winners to one file; returns how many."""
    found = [winner for file in sorted(folder().glob("*.json")) if (winner := _load(file)) is not None]
    with replacing(path) as file:
        json.dump({"format": _FORMAT, "winners": [winner._asdict() for winner in found]}, file, indent=1)
    return len(found)


def import_(path: Path) -> tuple[int, int]:
    """Import winners from a file that `export` wrote; returns how many were kept, and how many were of another
    build."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        found = [_read(written) for written in content["winners"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.not_tuning_results(path, error) from error
    ours = [winner for winner in found if winner.build == fingerprint.FINGERPRINT]
    for winner in ours:
        keep(winner)
    if ours:
        with replacing(_stamp_path()) as file:
            file.write(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    return len(ours), len(found) - len(ours)


def stamp() -> str:
    """Changes with every import. A tuned graph then recompiles."""
    try:
        return _stamp_path().read_text()
    except OSError:
        return ""


def _stamp_path() -> Path:
    return folder() / "imported"


def _load(path: Path) -> Winner | None:
    try:
        return _read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"{path} is not a tuning result and is ignored: {error}", stacklevel=3)
        return None


def _path(problem: str, device: str, fingerprint: str) -> Path:
    key = json.dumps([problem, device, fingerprint])
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(written: dict[str, Any]) -> Winner:
    winner = Winner(**written)
    for config in (winner.config, *(config for config, _ in winner.times_ms)):
        if not all(isinstance(size, int) for size in config.values()):
            raise ValueError("a config is names and whole numbers")
    if not all(isinstance(ms, float | int) for _, ms in winner.times_ms):
        raise ValueError("times are numbers of milliseconds")
    return winner
