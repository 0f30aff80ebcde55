"""`flex-inductor bench small`: short sequences, where what is around a kernel counts.

A compiled call is timed whole, and the kernel inside it in the same call: guards, checks, autograd and allocations are
the rest.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from . import shares
from .harness import Result, Spread, milliseconds, rounds

HELP = "short sequences: a compiled call's time over its kernel's"
COLUMNS = ("side", "ms", "kernel ms", "over the kernel", "at most")
OPTIONS = rounds(200)
MOST = 1.2
CASES = tuple(
    shares.Case(length, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for length in (128, 256, 512)
)


def measure(case: shares.Case, arguments: Namespace) -> Iterator[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    for side, step in shares.steps(case).items():
        with timed_kernels() as inside:
            step()
        step()
        whole, kernels, ratios = [], [], []
        for _ in range(arguments.rounds):
            inside.clear()
            whole.append(milliseconds(step))
            kernels.append(sum(inside))
            ratios.append(whole[-1] / kernels[-1])
        facts: dict[str, Any] = {"kernel": Spread.of(kernels), "ratio": Spread.of(ratios), "at_most": MOST}
        yield Result(case.title, side, Spread.of(whole), facts=facts)


@contextmanager
def timed_kernels() -> Iterator[list[float]]:
    """Has kernels that are compiled meanwhile add the milliseconds of each call to the list that this gives."""
    from torch._inductor.async_compile import AsyncCompile

    taken: list[float] = []
    compiled = AsyncCompile.cpp_pybinding

    def cpp_pybinding(*arguments: Any) -> Callable[..., None]:
        made = compiled(*arguments)

        def call(*given: Any) -> None:
            kernel = made.result() if hasattr(made, "result") else made
            start = time.perf_counter()
            kernel(*given)
            taken.append((time.perf_counter() - start) * 1e3)

        return call

    with mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield taken


def headline(results: list[Result]) -> str:
    most = max(results, key=lambda r: r.facts["ratio"].median)
    return f"at most {most.facts['ratio'].median:.2f} times its kernel: {most.case} {most.side}"
