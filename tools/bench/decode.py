"""`flex-inductor bench decode`: decoding next to the speed at which this machine reads memory.

A step reads all keys and values once. The first side reads as many bytes: the best of a plain sum, of memcpy's reads
and of a loop that prefetches. Pages have 16 tokens and lie in random order. Two bare loops read the same pages and do
nothing else, in order and in random order. With --busy another process keeps one core at work.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import loops, varlen
from .harness import (
    PLOT,
    Result,
    Spread,
    alternate,
    keep_freed_memory,
    milliseconds,
    plot_shares,
    results_of,
    rounds,
)

HELP = "decoding, next to the memory's speed"
COLUMNS = ("side", "ms", "over reading", "GB/s", "share")
OPTIONS = {
    **rounds(11),
    **PLOT,
    "--busy": {"action": "store_true", "help": "keep one core busy with something else"},
}
READING = "reading"
BARE: dict[str, Callable[[int], Any]] = {
    "bare loop, in order": torch.arange,
    "bare loop, pages of 16": torch.randperm,
}


def _case(count: int, dtype: torch.dtype) -> varlen.Case:
    lengths = (32768,) if count == 1 else varlen._mixed(count, 65536)
    return varlen.Case("decode", lengths, (16,), heads=32, kv_heads=8, head_dim=128, dtype=dtype)


CASES = tuple(
    case
    for dtype in (torch.float32, torch.bfloat16)
    for case in (
        *(_case(count, dtype) for count in (1, 4, 16, 64)),
        varlen.Case("small heads", varlen._mixed(64, 1 << 18), (16,), heads=8, kv_heads=2, dtype=dtype),
    )
)


def measure(case: varlen.Case, arguments: Namespace) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    keep_freed_memory()
    sides, _ = varlen.decoding(case)
    size = sum(case.lengths) * case.kv_heads * case.head_dim * 2 * case.dtype.itemsize
    steps: dict[str, Callable[[], Any]] = {READING: loops.reader(size)}
    steps |= {name: side.step for name, side in sides.items() if name != varlen.SDPA}
    count = -(-sum(case.lengths) // 16)
    keys, values = (torch.ones(count, 16, case.kv_heads, case.head_dim, dtype=case.dtype) for _ in range(2))
    steps |= {name: loops.page_reader(keys, values, order(count).int()) for name, order in BARE.items()}
    for step in steps.values():
        step()
    with busy() if arguments.busy else contextlib.nullcontext():
        times = alternate(
            {name: partial(milliseconds, step) for name, step in steps.items()}, arguments.rounds
        )

    def facts(_: str, taken: list[float]) -> dict[str, Any]:
        share = [own / ms for own, ms in zip(times[READING], taken, strict=True)]
        return {"rate": Spread.of([size / ms / 1e6 for ms in taken]), "share": Spread.of(share)}

    return results_of(case.title, times, facts)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Another process that takes all of a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def attention(results: list[Result]) -> list[Result]:
    return [result for result in results if result.side not in (READING, *BARE)]


def headline(results: list[Result]) -> str:
    least = min(attention(results), key=lambda result: result.facts["share"].median)
    return f"worst share of the memory's speed: {least.facts['share'].median:.2f}, {least.case}, {least.side}"


def plot(axis: Any, results: list[Result], _: Namespace) -> None:
    sides = [*dict.fromkeys(result.side for result in attention(results))]
    plot_shares(axis, results, sides, "the speed at which memory is read")
