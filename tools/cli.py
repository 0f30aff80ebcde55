"""The flex-inductor command. Each subcommand is a module of this folder with a `register` function."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from flex_inductor import __version__
from flex_inductor.errors import FlexError

# Imported on every call, --version included: these modules import torch inside their functions.
COMMANDS = ("bench", "check", "env", "inspect_command", "mask", "plan", "profile", "tune")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    parser = Parser(prog="flex-inductor", description="Look into flex_inductor and the machine it runs on.")
    parser.add_argument("--version", action="version", version=f"flex_inductor {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"flex_inductor.tools.{name}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (FlexError, OSError) as error:
        # One line, so that the message is easy to find.
        print(f"{parser.prog} {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
