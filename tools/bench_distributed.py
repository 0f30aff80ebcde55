"""`flex-inductor bench distributed`: methods of context parallelism side by side, over processes of this machine.

All sides of a case take turns, in the opposite order every second round; a time is that of the slowest rank. Processes
are joined by gloo: times say how much each method computes and copies, not what it takes over a network of GPUs. Bytes
are those that the busiest rank sends to others. An error is the largest against one fp64 process, over the largest
value, of outputs and of all gradients.
"""

from __future__ import annotations

import argparse
from typing import Any

from .files import at_least_one, to_write


def register(kinds: Any) -> None:
    parser = kinds.add_parser(
        "distributed", help="methods of context parallelism, over processes on the CPU", description=__doc__
    )
    parser.add_argument("--ranks", type=at_least_one, default=4, metavar="N", help="processes (default 4)")
    parser.add_argument(
        "--length", type=at_least_one, default=8192, metavar="N", help="tokens (default 8192)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, metavar="N", help="(default 5)")
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--eager", action="store_true", help="compile nothing: torch operations in chunks")
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write the results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from . import distributed_methods

    return distributed_methods.run(arguments)
