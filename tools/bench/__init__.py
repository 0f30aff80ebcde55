"""flex-inductor bench: one module for each kind of measurement; what they share is in harness.py and call.py."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    from . import compile, cpu, distributed, gpu, huggingface, masks, static, varlen

    parser = subparsers.add_parser("bench", help="measure")
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    for kind in (compile, cpu, distributed, gpu, huggingface, masks, static, varlen):
        kind.register(kinds)
