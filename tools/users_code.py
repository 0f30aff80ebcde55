"""Functions of a user's script or module, for commands that are given `path/to/script.py:function`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flex_inductor.errors import FlexError


class Refused(FlexError):
    """What the user gave cannot be served; the message is one line."""


def found(where: str) -> Callable:
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name:
        raise Refused(f"expected path/to/script.py:function or module:function, got {where!r}")
    with running(place):
        module = _script(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise Refused(f"{place} has no function {name!r}; it has {', '.join(known[:20]) or 'none'}")
    return function


def _script(path: Path) -> Any:
    if not path.is_file():
        raise Refused(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """The user's code: what it raises becomes one line, and what it prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (FlexError, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        raise Refused(f"{what} fails: {type(error).__name__}: {error}{at}") from None
