"""What the last process that compiled attention decided: the record that lowerings/record_file.py keeps, as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flex_inductor.lowerings import record_file
from flex_inductor.lowerings.decision import Choice, Decision

from .. import errors


def read() -> dict[str, Any]:
    """The record, or an error that says why there is none."""
    try:
        record = json.loads(record_file.path().read_text())
        if record["format"] != record_file.FORMAT:
            raise ValueError(f"format {record['format']!r}")
        page(record)  # reads all of it
    except FileNotFoundError:
        raise errors.no_record(record_file.path().parent) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise errors.not_a_record(record_file.path(), error) from None
    return record


def page(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"{record['program']}, process {record['process']}, {record['time']} ({versions})"]
    for compilation in record["compilations"]:
        lines += ["", *_compilation(compilation)]
    return "\n".join(lines)


def _compilation(entry: dict[str, Any]) -> Iterator[str]:
    yield f"== {entry['function']}, compilation {entry['id']}"
    if entry["recompiled"]:
        yield f"   compiled again: {entry['recompiled']}"
    for number, call in enumerate(entry["calls"]):
        yield f"   call {number}" + (f", {call['where']}: {call['text']}" if call["where"] else "")
        same = next(i for i, other in enumerate(entry["calls"]) if other["decisions"] == call["decisions"])
        if same < number:
            yield f"      as call {same}"
            continue
        for direction, decision in call["decisions"].items():
            yield f"      {direction}"
            yield from (f"         {line}" for line in _decision(decision))
        if not call["decisions"] and not entry["failed"]:
            yield "      not lowered: nothing uses what it gives"
    if entry["left_out"]:
        yield f"   and {entry['left_out']} more"
    if entry["failed"]:
        yield from (f"   {line}" for line in f"failed: {entry['failed']}".splitlines())


def _decision(found: dict[str, Any]) -> list[str]:
    kernels = tuple(Choice(*kernel) for kernel in found["kernels"])
    _, *lines = str(Decision(**{**found, "kernels": kernels})).splitlines()
    return [found["call"].partition(" ")[2], *lines]
