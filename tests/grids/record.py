"""What a whole run has done, in a file that only grows: a run that is killed goes on where it was."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from .tables import version


class OtherTables(Exception):
    """The record is of other tables."""


class Record:
    """`done` counts the first cases of each group, in its order; of what was refused, reasons are counted."""

    def __init__(self, path: Path | None) -> None:
        self.done: dict[tuple[str, int], int] = {}
        self.refused: dict[tuple[str, int], dict[str, int]] = {}
        self.failed: dict[str, str] = {}
        self._file: Any = None
        if path is None:
            return
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:  # torn, as the run was killed
                continue
            if number == 0 and entry != ["tables", version()]:
                raise OtherTables(
                    f"{path}: is of other tables ({entry}); give another --record, or remove it"
                )
            self._read(entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        if lines:
            self._file.write("\n")  # ends a torn line
        else:
            self._write(["tables", version()])

    def _read(self, entry: list) -> None:
        if entry[0] == "done":
            _, suite, group, count, refused = entry
            self.done[suite, group] = count
            self.refused[suite, group] = refused
        elif entry[0] == "failed":
            self.failed[entry[1]] = entry[2]

    def _write(self, entry: list) -> None:
        self._read(entry)
        if self._file is not None:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def write_done(self, suite: str, group: int, count: int, refused: dict[str, int]) -> None:
        self._write(["done", suite, group, count, refused])

    def write_failed(self, case_id: str, why: str) -> None:
        self._write(["failed", case_id, why])

    def reasons(self) -> collections.Counter[tuple[str, str]]:
        """How many cases of each suite were refused, and why."""
        counted: collections.Counter[tuple[str, str]] = collections.Counter()
        for (suite, _), reasons in self.refused.items():
            for reason, count in reasons.items():
                counted[suite, reason] += count
        return counted
