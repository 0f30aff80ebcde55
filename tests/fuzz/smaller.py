"""Makes a call that fails as small as it can be: fewer calls, default values, parts of its mods."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from typing import Any

MINUTES = 5


def smaller(check: Callable[[Any, list], None], program: Any, several: list) -> tuple[Any, list]:
    """A program and calls of it that fail as these do."""
    end = time.monotonic() + 60 * MINUTES
    failure = _failure(check, program, several)

    def fails(program: Any, several: list) -> bool:
        return time.monotonic() < end and _failure(check, program, several) == failure

    for value in several:
        if fails(program, [value]):
            several = [value]
            break
    found = True
    while found:
        found = False
        for candidate in _simpler(program):
            if fails(candidate, several):
                program, found = candidate, True
                break
        for place, value in enumerate(several):
            for candidate in _simpler(value):
                fewer = [*several[:place], candidate, *several[place + 1 :]]
                if fails(program, fewer):
                    several, found = fewer, True
                    break
    return program, several


def _failure(check: Callable[[Any, list], None], program: Any, several: list) -> str | None:
    """What kind of failure this is: a candidate may fail in a way of its own."""
    try:
        check(program, several)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).split(' ')[0]}"
    return None


def _simpler(value: Any) -> Iterator[Any]:
    """What differs in one place, the largest steps first."""
    for name, of in value._asdict().items():
        is_number = isinstance(of, int) and not isinstance(of, bool)  # which only gets smaller
        default = value._field_defaults.get(name)
        for candidate in [*([] if is_number or of == default else [default]), *_parts(of)]:
            yield value._replace(**{name: candidate})


def _parts(of: Any) -> Iterator[Any]:
    if isinstance(of, str):
        try:
            tree = ast.parse(of, mode="eval").body
        except SyntaxError:
            return
        inner = [
            ast.unparse(part) for part in ast.walk(tree) if isinstance(part, ast.expr) and part is not tree
        ]
        yield from sorted({part for part in inner if len(part) < len(of)}, key=len)
    elif isinstance(of, int) and not isinstance(of, bool):
        yield from dict.fromkeys(n for n in (1, 2, of // 2, of - 1) if 0 < n < of)
    elif hasattr(of, "_fields"):
        yield from _simpler(of)
    elif isinstance(of, tuple) and of and isinstance(of[0], tuple):  # sequences of a batch
        yield from (of[:i] + of[i + 1 :] for i in range(len(of)) if len(of) > 1)
