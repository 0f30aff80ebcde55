"""`flex-inductor inspect`: a report of a function in somebody's script."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

from .options import file
from .users_code import Refused, add_inputs, called, running


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
    add_inputs(parser, "q=1x8x1024x64:bf16")
    add("--target", help="cpu, sm_80, sm_90, sm_100, gfx942... (default: where the tensors are)")
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

    fn, args, kwargs = called(arguments.function, arguments.input)
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

    others = ("input", "no_backward", "target", "kernel", "source_only", "html", "against")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name)]
    if arguments.function is not None:
        given.insert(0, arguments.function)
    if given:
        raise Refused(f"--last shows what another process compiled: leave {', '.join(given)} out")
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
        return {name: data[name] for name in ("target", "versions", "calls", "kernels", "plans")}
    except (KeyError, TypeError):
        raise Refused(f"--against {path}: not a report saved with --json") from None
    except (OSError, ValueError) as error:
        raise Refused(f"--against {path}: not a report saved with --json ({error})") from None
