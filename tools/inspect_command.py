"""`flex-inductor inspect`: a report of a function in somebody's script."""

from __future__ import annotations

import argparse
import contextlib
import inspect as signatures
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .options import file
from .users_code import Refused, found, running

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what attention calls become: decisions, graphs, schedules, kernels",
        description=(
            "Shows what the attention calls of a function become. Without --input the function takes nothing and "
            "returns (fn, args); with --input it is itself called with those tensors."
        ),
        epilog="Example: flex-inductor inspect train.py:attend --input q=1x8x1024x64:bf16:grad --target sm_90",
    )
    add = parser.add_argument
    add("function", nargs="?", help="path/to/script.py:function or module:function")
    last = (
        "instead: what the last process that compiled attention decided, and what it compiled again, and why"
    )
    add("--last", action="store_true", help=last)
    given = "an argument, for example q=1x8x1024x64:bf16, with :grad behind where it needs a gradient"
    add("--input", action="append", default=[], metavar="NAME=SHAPE:DTYPE", help=given)
    add("--target", help="cpu, sm_80, sm_90, sm_100, gfx942... (default: where the tensors are)")
    add("--no-backward", action="store_true", help="leave the backward out")
    add("--kernel", metavar="NAME", help="only kernels of this kind (backward: all of its) or name")
    add("--source-only", action="store_true", help="print kernels' whole sources and nothing else")
    add("--html", **file("write the report as a web page"))
    add("--json", **file("write the report as JSON"))
    add("--against", metavar="FILE", help="print what differs from a report saved with --json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.last:
        return _last(arguments)
    if arguments.function is None:
        raise Refused("needs a function: path/to/script.py:function or module:function, or --last")
    before = None if arguments.against is None else _saved(arguments.against)
    from .inspector import inspect
    from .inspector.page import page

    fn, args, kwargs = _called(arguments.function, arguments.input)
    # What torch prints on the way is hidden; an error that ends the inspection is still shown.
    with running(arguments.function), contextlib.redirect_stderr(io.StringIO()):
        report = inspect(fn, *args, target=arguments.target, backward=not arguments.no_backward, **kwargs)
    if arguments.html:
        report.to_html(arguments.html)
    if arguments.json:
        report.to_json(arguments.json)
    kernels = [k for k in report.kernels if _is_asked_for(k, arguments.kernel)]
    if not kernels and arguments.kernel:
        kinds = ", ".join(dict.fromkeys(kernel.kind for kernel in report.kernels)) or "none"
        raise Refused(f"--kernel {arguments.kernel}: no such kernel; there is {kinds}")
    if arguments.source_only:
        print("\n".join(kernel.source for kernel in kernels))
    elif before is not None:
        from .inspector.compare import differences

        print(differences(before, report.to_dict()))
    elif arguments.html or arguments.json:
        for path in filter(None, (arguments.html, arguments.json)):
            print(f"written to {path}")
    else:
        print(page(report, kernels=kernels))
    return 0


def _last(arguments: argparse.Namespace) -> int:
    from .inspector import last

    if arguments.function is not None:
        raise Refused(f"--last shows what another process compiled: leave {arguments.function} out")
    record = last.read()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {arguments.json}")
    else:
        print(last.page(record))
    return 0


def _is_asked_for(kernel: Any, name: str | None) -> bool:
    return name is None or kernel.name == name or kernel.kind == name or kernel.kind.startswith(f"{name}_")


def _saved(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
        return {name: data[name] for name in ("target", "versions", "calls", "kernels")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"--against {path}: not a report saved with --json ({error})") from None


def _called(where: str, inputs: list[str]) -> tuple[Callable, tuple, dict[str, Any]]:
    """The function to inspect and its arguments."""
    given = dict(map(_input, inputs))
    function = found(where)
    parameters = signatures.signature(getattr(function, "forward", function))
    if given:
        try:
            parameters.bind(**given)
        except TypeError as error:
            raise Refused(f"--input: {where}{parameters} does not take {', '.join(given)}: {error}") from None
        return function, (), given
    variable = (signatures.Parameter.VAR_POSITIONAL, signatures.Parameter.VAR_KEYWORD)
    every = parameters.parameters.values()
    if needed := [p.name for p in every if p.default is p.empty and p.kind not in variable]:
        raise Refused(
            f"{where} takes {', '.join(needed)}: give them with --input, such as --input {needed[0]}=1x8x1024x64:bf16"
        )
    with running(where):
        made = function()
    match made:
        case tuple((fn, tuple(args))) if callable(fn):
            return fn, args, {}
    raise Refused(
        f"{where} must return (fn, args) with a tuple of arguments, but returned a {type(made).__name__}; "
        f"to inspect the function itself, give its arguments with --input"
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
    return name, torch.zeros(sizes, dtype=getattr(torch, DTYPES[dtype or "f32"]), requires_grad=bool(grad))
