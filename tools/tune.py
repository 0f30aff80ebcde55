"""flex-inductor tune: carry tuning results from one machine to another of its kind."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import to_write


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune", help="export and import what mode='max-autotune' has found")
    actions = parser.add_subparsers(title="what to do", dest="action", metavar="ACTION", required=True)
    written = actions.add_parser("export", help="write all results of this machine's cache to a file")
    written.add_argument("file", type=to_write)
    read = actions.add_parser("import", help="keep the results in a file that was exported")
    read.add_argument("file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from flex_inductor.lowerings import winners

    file = Path(arguments.file)
    if arguments.action == "export":
        print(f"{winners.export(file)} results written to {file}")
    else:
        kept, others = winners.import_(file)
        left_out = f"; {others} of another version or instruction set left out" if others else ""
        print(f"{kept} results kept{left_out}")
    return 0
