"""flex-inductor tune: carry tuning results from one machine to another of its kind."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import to_write


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune", help="export and import what mode='max-autotune' has found")
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    for name, done, file, help_ in (
        ("export", export, to_write, "write all results of this machine's cache to a file"),
        ("import", import_, str, "keep the results in a file that was exported"),
    ):
        action = actions.add_parser(name, help=help_)
        action.add_argument("file", type=file)
        action.set_defaults(run=run, done=done)


def run(arguments: argparse.Namespace) -> int:
    print(arguments.done(Path(arguments.file)))
    return 0


def export(file: Path) -> str:
    from flex_inductor.lowerings import winners

    return f"{winners.export(file)} results written to {file}"


def import_(file: Path) -> str:
    from flex_inductor.lowerings import winners

    kept, others = winners.import_(file)
    left_out = f"; {others} of another version or instruction set left out" if others else ""
    return f"{kept} results kept{left_out}"
