"""Functions of a user's script or module, for commands that are given `path/to/script.py:function`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flex_inductor.errors import FlexError, kind_of

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}


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


def add_inputs(parser: argparse.ArgumentParser, example: str, backward: bool = True) -> None:
    """The arguments of commands that call a function and, where that is a choice, its backward."""
    given = f"an argument, for example {example}, with :grad behind where it needs a gradient"
    parser.add_argument("--input", action="append", default=[], metavar="NAME=SHAPE:DTYPE", help=given)
    if backward:
        parser.add_argument("--no-backward", action="store_true", help="leave the backward out")


def called(where: str, inputs: list[str]) -> tuple[Callable, tuple, dict[str, Any]]:
    """The function and its arguments: from `inputs`, or what it returns itself."""
    given = dict(map(_input, inputs))
    function = found(where)
    parameters = inspect.signature(getattr(function, "forward", function))
    try:
        parameters.bind_partial(**given)
    except TypeError as error:
        raise Refused(f"--input: {where}{parameters} does not take {', '.join(given)}: {error}") from None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    every = parameters.parameters.values()
    needed = [p.name for p in every if p.default is p.empty and p.kind not in variable]
    if missing := [name for name in needed if name not in given]:
        raise Refused(
            f"{where}: no --input for {', '.join(missing)}; give it, such as --input {missing[0]}=1x8x1024x64:bf16"
        )
    if given:
        return function, (), given
    with running(where):
        made = function()
    match made:
        case tuple((fn, tuple(args))) if callable(fn):
            return fn, args, {}
        case tuple((fn, Mapping() as kwargs)) if callable(fn):
            return fn, (), dict(kwargs)
    raise Refused(
        f"{where} must return (fn, args) with a tuple or a dict of arguments, but returned {kind_of(made)}; "
        f"to call the function itself, give its arguments with --input"
    )


def _input(text: str) -> tuple[str, Any]:
    """NAME=SHAPE:DTYPE[:grad] as a tensor of zeros."""
    import torch

    wanted = re.fullmatch(r"([^\W\d]\w*)=(\d+(?:x\d+)*)?(?::(\w+))?(:grad)?", text)
    if wanted is None or wanted[3] not in (None, *DTYPES):
        raise Refused(
            f"--input {text}: expected NAME=SHAPE:DTYPE such as q=1x8x1024x64:bf16, with a dtype of "
            f"{', '.join(DTYPES)} and :grad behind where it needs a gradient"
        )
    name, shape, dtype, grad = wanted.groups()
    sizes = [int(size) for size in shape.split("x")] if shape else []
    with running(f"--input {text}"):  # it may be too large
        return name, torch.zeros(
            sizes, dtype=getattr(torch, DTYPES[dtype or "f32"]), requires_grad=bool(grad)
        )
