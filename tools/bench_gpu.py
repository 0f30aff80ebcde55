"""`flex-inductor bench gpu`: our kernels on this machine's card, next to torch's flex_attention and SDPA.

Each side is checked against uncompiled attention in fp32 before it is timed. Sides take turns, in the opposite order
every second round; shown are the median over the rounds and the middle half of them. The cases come in order of
importance, each in a process of its own, so that one may crash or hang. Those for which no time is left are named.
With --compare our own configs are timed against each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .cases import selected


def register(kinds: Any) -> None:
    parser = kinds.add_parser("gpu", help="attention kernels on this machine's card", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--minutes", type=float, default=6.0, help="end after these (default 6)")
    parser.add_argument("--rounds", type=int, default=6, help="how often each side is timed (default 6)")
    parser.add_argument("--max-autotune", action="store_true", help="tune our configs and torch's")
    parser.add_argument(
        "--compare", metavar="KERNEL", help="time every config of this kernel of ours instead"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write report.md and report.json there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from .gpu.cases import CASES
    from .gpu.compare import PASS_OF, compare
    from .gpu.measure import TUNED, Setting
    from .gpu.table import Bench, Report
    from .workers import Deadline

    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    if arguments.compare not in (None, *PASS_OF):
        print(f"no kernel is called {arguments.compare!r}; there are {', '.join(PASS_OF)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            "this machine has no GPU that torch can use; `flex-inductor bench static` needs none",
            file=sys.stderr,
        )
        return 2
    setting = Setting(rounds=arguments.rounds, mode=TUNED if arguments.max_autotune else None)
    with Bench(setting, Report(arguments.out), Deadline(arguments.minutes)) as bench:
        bench.start()
        if arguments.compare is None:
            bench.table(chosen)
        else:
            compare(bench, chosen[0], arguments.compare)
    return 0
