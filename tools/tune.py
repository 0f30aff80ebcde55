"""flex-inductor tune: carry tuning results from one machine to another of its kind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .files import to_write


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune", help="export and import what mode='max-autotune' has found")
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    for name, run, file, help_ in (
        ("export", export, to_write, "write all results of this machine's cache to a file"),
        ("import", import_, str, "keep the results in a file that was exported"),
    ):
        action = actions.add_parser(name, help=help_)
        action.add_argument("file", type=file)
        action.set_defaults(run=run)


def export(arguments: argparse.Namespace) -> int:
    from flex_inductor.lowerings import winners

    return _say(lambda: f"{winners.export(Path(arguments.file))} results written to {arguments.file}")


def import_(arguments: argparse.Namespace) -> int:
    from flex_inductor.lowerings import winners

    def done() -> str:
        kept, others = winners.import_(Path(arguments.file))
        left_out = f"; {others} of another version or instruction set left out" if others else ""
        return f"{kept} results kept{left_out}"

    return _say(done)


def _say(action) -> int:
    try:
        print(action())
    except (OSError, ValueError) as error:
        print(f"flex-inductor tune: {error}", file=sys.stderr)
        return 2
    return 0
