"""`flex-inductor bench masks`: what building block masks costs, next to torch's own function.

Each side has a process of its own: imports, then the first call (with a small mask, as a model's first step would
pay it). Then the sides take turns, in the opposite order every second round; shown are the median over the rounds and
the middle half of them. The peak of memory is another process's, which gives freed memory back at once.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks import library
from flex_inductor.masks.library.algebra import or_masks
from flex_inductor.masks.library.blockmask import create_block_mask

from .call import documents
from .harness import OURS, PLOT, Result, above_start, alternate, milliseconds, results_of, return_freed_memory
from .workers import Failed, Job, Worker

HELP = "the cost of building block masks"
OPTIONS: dict[str, Any] = {
    **PLOT,
    "--no-torch": {"action": "store_true", "help": "leave torch's function out (it takes minutes)"},
}
COLUMNS = ("side", "ms", "over ours", "best", "at most", "first", "peak MB", "at most")
SIDES = (OURS, "torch eager", "torch compiled")
ROUNDS, MOST_SECONDS = 15, 10
PLOT_LENGTHS = tuple(1 << n for n in range(12, 21))


@dataclass(frozen=True)
class Case:
    title: str
    length: int
    make: Callable[[], Callable]
    most_ms: float
    most_mb: float
    compact: bool = False
    torch_too: bool = False


def hashed(b, h, q, kv):
    return ((q.long() * 2654435761) ^ (kv * 40503)) % 1009 < 5


def image(side: int) -> Callable:
    def neighbours(b, h, q, kv):
        return ((q % side - kv % side).abs() <= 6) & ((q // side - kv // side).abs() <= 6)

    return neighbours


def unsorted(count: int | None = None) -> Callable:
    """65,536 tokens in no order, of `count` documents at random, or each of its own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, count, (65536,), generator=generator) if count else None
    ids = torch.randperm(65536, generator=generator) if ids is None else ids
    return library.document(ids, causal=False)


def of_documents(length: int, count: int) -> Callable[[], Callable]:
    return lambda: library.document(documents(length, count))


_compact: dict[str, Any] = {"compact": True}
_torch: dict[str, Any] = {"torch_too": True}
CASES = (
    Case("causal", 32768, library.causal, 25, 25, **_torch),
    Case("sliding 1024", 32768, lambda: library.sliding_window(1024), 25, 25, **_torch),
    Case("causal + 8 documents", 32768, of_documents(32768, 8), 25, 25, **_torch),
    Case("prefix 4000", 32768, lambda: or_masks(library.causal(), lambda b, h, q, kv: kv < 4000), 25, 25),
    Case("1M causal, compact", 1 << 20, library.causal, 30, 40, **_compact),
    Case("1M causal + 256 documents, compact", 1 << 20, of_documents(1 << 20, 256), 60, 50, **_compact),
    Case("600 new documents, compact", 262144, of_documents(262144, 600), 30, 50, **_compact),
    Case("600 new documents", 262144, of_documents(262144, 600), 70, 120),
    Case("13 x 13 neighbours, 256 x 256", 65536, lambda: image(256), 50, 100),
    Case("13 x 13 neighbours, 250 x 250", 62500, lambda: image(250), 1500, 100),
    Case("hash", 16384, lambda: hashed, 700, 100, **_torch),
    Case("unsorted ids of 600", 65536, lambda: unsorted(600), 4000, 150),
    Case("unsorted ids of 10,000", 65536, lambda: unsorted(10000), 4000, 150),
    Case("distinct ids", 65536, unsorted, 4000, 150),
)


_builds: dict[str, Callable[[], Any]] = {}  # of this process, by side


def prepare(title: str, side: str) -> float:
    """Milliseconds of the first call in a new process, which then keeps the case's own for `again`."""
    warm_up, build = _calls(title, side)
    first = milliseconds(warm_up)
    build()
    _builds[side] = build
    return first


def peak_of(title: str, side: str) -> float:
    """MB at the peak of the case, in a new process."""
    return_freed_memory()
    warm_up, build = _calls(title, side)
    warm_up()
    return above_start(build)


def _calls(title: str, side: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A first call, and the case's own."""
    case = next(case for case in CASES if case.title == title)
    functions: dict[str, Callable] = {
        OURS: partial(create_block_mask, compact=case.compact),
        "torch eager": torch_create_block_mask,
        "torch compiled": torch.compile(torch_create_block_mask),
    }
    create = functions[side]
    build = partial(create, case.make(), None, None, case.length, case.length, "cpu")
    if side == "torch compiled":  # it is warm only for the very same call
        return build, build
    return partial(create, library.causal(), None, None, 512, 512, "cpu"), build


def again(side: str) -> float:
    return milliseconds(_builds[side])


def measure(case: Case, arguments: Namespace) -> list[Result]:
    found: dict[str, tuple[float, float]] = {}
    refused: dict[str, str] = {}
    sides: dict[str, Callable[[], float]] = {}

    def facts(side: str, times: list[float]) -> dict[str, Any]:
        first, peak = found[side]
        most_ms, most_mb = (case.most_ms, case.most_mb) if side == OURS else ("", "")
        return {
            "best": min(times),
            "most_ms": most_ms,
            "first_ms": first,
            "peak_mb": peak,
            "most_mb": most_mb,
        }

    with ExitStack() as processes:
        for side in SIDES if case.torch_too and not arguments.no_torch else SIDES[:1]:
            worker = processes.enter_context(Worker())
            try:
                with Worker() as another:
                    peak = another.run(Job(peak_of, (case.title, side)))
                found[side] = worker.run(Job(prepare, (case.title, side))), peak
                sides[side] = partial(worker.run, Job(again, (side,)))
            except Failed as failure:
                refused[side] = str(failure)
        return results_of(case.title, alternate(sides, ROUNDS, MOST_SECONDS), facts, refused)


def plot(axis: Any, _: list[Result], arguments: Namespace) -> None:
    """Milliseconds of causal + documents of about 4k tokens, over the length."""
    sides: dict[str, tuple[Callable, int, int]] = {  # function, longest mask, calls
        "BlockMask": (create_block_mask, 1 << 18, 7),
        "compact": (partial(create_block_mask, compact=True), 1 << 20, 7),
        "torch eager": (torch_create_block_mask, 0 if arguments.no_torch else 1 << 14, 1),
    }
    for name, (build, longest, calls) in sides.items():
        points: dict[int, float] = {}
        for length in [length for length in PLOT_LENGTHS if length <= longest]:
            mask_mod = of_documents(length, max(1, length // 4096))()
            call = partial(build, mask_mod, None, None, length, length, "cpu")
            points[length] = statistics.median(milliseconds(call) for _ in range(calls))
        if points:
            axis.plot([*points], [*points.values()], marker="o", label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="causal + documents of about 4k")
