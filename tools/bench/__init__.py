"""flex-inductor bench: one module for each kind of measurement; what they share is in harness.py and call.py.

A module has HELP, its docstring for the rest of --help, OPTIONS, COLUMNS, CASES with titles, and `measure`, which is
called with a case and the command's arguments. `cases` in place of CASES makes them from the arguments, `plot` draws
results, and `page` writes them as a page. gpu.py, whose cases share workers and a deadline, runs by itself.
"""

from __future__ import annotations

import argparse
from functools import partial

from .. import options


def register(subparsers: argparse._SubParsersAction) -> None:
    from . import (
        bias,
        compile,
        cpu,
        decode,
        distributed,
        gpu,
        harness,
        huggingface,
        masks,
        memory,
        page,
        peak,
        peers,
        shares,
        small,
        static,
        threads,
        varlen,
    )

    on_cpus = (cpu, shares, decode, varlen, small, threads, bias, memory, compile, masks, peak)
    named = {
        kind.__name__.rpartition(".")[2]: kind
        for kind in (*on_cpus, distributed, gpu, huggingface, static, peers)
    }
    bench = subparsers.add_parser("bench", help=page.HELP, description=page.__doc__)
    page.add_options(bench, [*named][: len(on_cpus)])
    bench.set_defaults(run=partial(page.run, named))
    kinds = bench.add_subparsers(title="what to measure", metavar="KIND")
    for name, kind in named.items():
        parser = kinds.add_parser(name, help=kind.HELP, description=kind.__doc__)
        if kind is gpu:
            options.add(parser, gpu.OPTIONS)
            parser.set_defaults(run=gpu.run)
        else:
            options.add(parser, {**harness.OPTIONS, **kind.OPTIONS})
            parser.set_defaults(run=partial(harness.run, kind))
