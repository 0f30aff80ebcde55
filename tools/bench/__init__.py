"""flex-inductor bench: one module for each kind of measurement; what they share is in harness.py and call.py.

A module has HELP, its docstring for the rest of --help, OPTIONS, COLUMNS, CASES with titles, and `measure`, which is
called with a case and the command's arguments. `cases` in place of CASES makes them from the arguments, and `plot`
draws results. gpu.py, whose cases share workers and a deadline, runs by itself.
"""

from __future__ import annotations

import argparse
from functools import partial

from .. import options


def register(subparsers: argparse._SubParsersAction) -> None:
    from . import compile, cpu, distributed, gpu, harness, huggingface, masks, static, varlen

    parser = subparsers.add_parser("bench", help="measure")
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    for kind in (compile, cpu, distributed, gpu, huggingface, masks, static, varlen):
        name = kind.__name__.rpartition(".")[2]
        parser = kinds.add_parser(name, help=kind.HELP, description=kind.__doc__)
        if kind is gpu:
            options.add(parser, gpu.OPTIONS)
            parser.set_defaults(run=gpu.run)
        else:
            options.add(parser, {**harness.OPTIONS, **kind.OPTIONS})
            parser.set_defaults(run=partial(harness.run, kind))
