"""What this process compiled last, in one small file that other processes may read: see tools/inspector/last.py."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from flex_inductor import compat, fingerprint
from flex_inductor.mod_ir.source_lines import call_line, frames, last_line

from . import cache_folder
from .decision import Decision
from .observing import observer

FORMAT = 1
MOST_COMPILATIONS = 32  # the newest are kept
MOST_CALLS = 64  # calls of one compilation, the first ones
MOST_LETTERS = 400  # of one text

# No lock: torch compiles, and loads what is cached, in one thread at a time.
_compilations: dict[str, dict[str, Any]] = {}  # by what Dynamo calls them, the oldest first
_depth = 0  # of nested `_written_at_the_end`


def path() -> Path:
    return cache_folder.folder() / "last.json"


@contextlib.contextmanager
def compilation(nodes: list[fx.Node]) -> Iterator[None]:
    """Around the compilation of a Dynamo graph with these attention calls."""
    if not nodes or not observer().records:
        yield
        return
    with _written_at_the_end():
        entry = _begin(nodes)
        try:
            yield
        except Exception as error:
            entry["failed"] = _short(f"{type(error).__name__}: {error}")
            raise


def note(decision: Decision, number: int) -> None:
    """Record a decision on the call of that number in the graph being compiled, or loaded from a cache."""
    entry = _compilations.get(_current())
    if entry is None or number >= len(entry["calls"]):
        return
    with _written_at_the_end():
        entry["calls"][number]["decisions"][decision.call.partition(" ")[0]] = {
            "call": _short(decision.call),
            "chosen": decision.chosen,
            "why": _short(decision.why),
            "rejected": [[name, _short(reason)] for name, reason in decision.rejected],
            "notes": [_short(text) for text in decision.notes],
            "kernels": [[choice.kernel, choice.config, _short(choice.why)] for choice in decision.kernels],
        }


def _current() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def _begin(nodes: list[fx.Node]) -> dict[str, Any]:
    outermost = frames(nodes[0])[:1]
    lines = [call_line(node) for node in nodes[:MOST_CALLS]]
    entry: dict[str, Any] = {
        "id": _current(),
        "function": outermost[0].line.function if outermost else "a graph",
        "recompiled": _guard(compat.recompile_reason()),
        "failed": None,
        "left_out": max(0, len(nodes) - MOST_CALLS),
        "calls": [
            {"where": str(line or ""), "text": _short(line.text) if line else "", "decisions": {}}
            for line in lines
        ],
    }
    _compilations.pop(entry["id"], None)
    _compilations[entry["id"]] = entry
    while len(_compilations) > MOST_COMPILATIONS:
        del _compilations[next(iter(_compilations))]
    return entry


def _guard(reason: str | None) -> str | None:
    """The guard that failed, and the line it came from: Dynamo's text has a stack below it."""
    if reason is None:
        return None
    earlier, _, guard = reason.splitlines()[0].partition("  # ")[0].strip().partition(": ")
    line = last_line(reason)
    return _short(f"{guard or earlier}{f' ({line})' if line else ''}")


def _short(text: str) -> str:
    """Without folders, and cut to MOST_LETTERS."""
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."


@contextlib.contextmanager
def _written_at_the_end() -> Iterator[None]:
    """Writes the file at the end; if nested, at the end of the outermost."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _write()


def _write() -> None:
    record = {
        "format": FORMAT,
        "program": Path(sys.argv[0]).name if sys.argv else "",
        "process": os.getpid(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "versions": {"flex_inductor": fingerprint.VERSION, "torch": torch.__version__},
        "compilations": list(_compilations.values()),
    }
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with cache_folder.replacing(path()) as file:
            json.dump(record, file, indent=1)
    except OSError as error:
        logging.getLogger("flex_inductor").info("what was compiled is not kept: %s", error)
