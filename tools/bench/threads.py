"""`flex-inductor bench threads`: one thread, as many as cores, and twice as many, in turn.

A case is a forward or a training step. The first side has one thread; a ratio of 0.5 is twice its speed.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import shares
from .harness import Result, alternate, milliseconds, results_of, rounds

HELP = "one thread, all cores, and more threads than cores"
COLUMNS = ("side", "ms", "over one thread")
OPTIONS = rounds(7)
CASES = (shares.Case(4096), shares.Case(4096, dtype=torch.bfloat16), shares.Case(512))


def measure(case: shares.Case, arguments: Namespace) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    cores = len(os.sched_getaffinity(0))
    found: list[Result] = []
    before = torch.get_num_threads()

    def timed(threads: int, step: Callable[[], Any]) -> float:
        torch.set_num_threads(threads)
        step()  # threads begin and end outside of what is timed
        return milliseconds(step)

    try:
        for direction, step in shares.steps(case).items():
            step()
            sides = {count_text(n, cores): partial(timed, n, step) for n in (1, cores, 2 * cores)}
            found += results_of(f"{case.title} {direction}", alternate(sides, arguments.rounds))
    finally:
        torch.set_num_threads(before)
    return found


def count_text(threads: int, cores: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)} on {min(threads, cores)} of {cores} cores"


def headline(results: list[Result]) -> str:
    """The least speed of several threads over one, where threads are as many as cores."""
    slowest = max(results[1::3], key=lambda r: r.facts["ratio"].median)
    return f"{1 / slowest.facts['ratio'].median:.2f} times the speed of one thread at least: {slowest.case}"
