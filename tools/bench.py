"""flex-inductor bench: one module for each kind of measurement."""

from __future__ import annotations

import argparse

from . import (
    bench_compile,
    bench_cpu,
    bench_distributed,
    bench_gpu,
    bench_huggingface,
    bench_masks,
    bench_static,
    bench_varlen,
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("bench", help="measure")
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    _register_kinds(kinds)


def _register_kinds(kinds: argparse._SubParsersAction) -> None:
    bench_compile.register(kinds)
    bench_cpu.register(kinds)
    bench_distributed.register(kinds)
    bench_gpu.register(kinds)
    bench_huggingface.register(kinds)
    bench_masks.register(kinds)
    bench_static.register(kinds)
    bench_varlen.register(kinds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flex_inductor.tools.bench", description=__doc__)
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    _register_kinds(kinds)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
