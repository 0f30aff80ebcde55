"""flex-inductor bench: what is measured, each kind in a module of its own."""

from __future__ import annotations

import argparse

from . import bench_gpu, bench_masks


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("bench", help="measure")
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    bench_gpu.register(kinds)
    bench_masks.register(kinds)
