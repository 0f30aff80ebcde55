"""What all benches share: sides that take turns, their results, the table, and the options of the command."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flex_inductor.masks.draw import load_matplotlib, save

from ..options import count, file

OURS = "ours"


@dataclass(frozen=True)
class Spread:
    """The middle half of some values: its ends, and the median."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{_three_digits(self.median)} ({_three_digits(self.low)} to {_three_digits(self.high)})"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Result:
    """One side of one case."""

    case: str
    side: str
    ms: Spread | None = None  # None where the side cannot serve
    note: str = ""  # why there is no time
    facts: dict[str, Any] = field(default_factory=dict)  # the ratio to the first side, and what else is found

    @property
    def cells(self) -> list[Any]:
        facts = (f"{fact:.3g}" if isinstance(fact, float) else fact for fact in self.facts.values())
        return [self.side, self.ms or self.note, *facts]


OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"metavar": "TEXT", "help": "cases whose title contains TEXT"},
    "--json": file("write the results ('-': to standard output)"),
}
PLOT = {"--plot": file("draw them to a .png or .svg file")}


def rounds(default: int) -> dict[str, dict[str, Any]]:
    return {"--rounds": count(default, "how often each side is timed")}


def run(bench: Any, arguments: argparse.Namespace) -> int:
    """Measure the chosen cases of a module, print a row for each result as it comes, and write the files."""
    cases = bench.cases(arguments) if hasattr(bench, "cases") else bench.CASES
    chosen = selected(cases, arguments.only)
    if not chosen:
        return 2
    drawn = getattr(arguments, "plot", None)
    figure = load_matplotlib().figure.Figure(layout="tight") if drawn else None
    quiet = arguments.json == "-"
    table = Table(bench.COLUMNS, max(len(case.title) for case in chosen))
    results: list[Result] = []
    if not quiet:
        print(", ".join(machine().values()), "", *table.head, sep="\n", flush=True)
    for case in chosen:
        for result in bench.measure(case, arguments):
            results.append(result)
            if not quiet:
                print(table.row(result), flush=True)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if not callable(value)}
        found = {
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "options": options,
            "results": [*map(asdict, results)],
        }
        with nullcontext(sys.stdout) if quiet else open(arguments.json, "w") as to:
            print(json.dumps(found, indent=2), file=to)
    if getattr(arguments, "page", None):
        Path(arguments.page).write_text(bench.page(results, arguments))
    if drawn and figure is not None:
        axis = figure.subplots()
        bench.plot(axis, results, arguments)
        axis.legend()
        save(figure, drawn, Path(drawn).suffix[1:])
    return 0


def selected(cases: Sequence[Any], only: str | None) -> list[Any]:
    """Those whose title contains `only`. If there is none, stderr names all."""
    found = [case for case in cases if not only or only in case.title]
    if not found:
        titles = "\n  ".join(case.title for case in cases)
        print(f"no case contains {only!r}; there are\n  {titles}", file=sys.stderr)
    return found


class Table:
    """Lines of a Markdown table. A case is named in the first of its rows."""

    def __init__(self, columns: Sequence[str], width: int):
        self.widths, self.last = [width, 15, 22, 22], ""
        self.head = [self._line(["case", *columns]), "| --- " * (1 + len(columns)) + "|"]

    def row(self, result: Result) -> str:
        shown, self.last = ("" if result.case == self.last else result.case), result.case
        return self._line([shown, *result.cells])

    def _line(self, cells: Sequence[Any]) -> str:
        padded = zip_longest(cells, self.widths[: len(cells)], fillvalue=0)
        return f"| {' | '.join(f'{cell!s:{width}}' for cell, width in padded)} |"


def machine() -> dict[str, str]:
    from ..env import cpu_name, packages

    return {
        "cpu": cpu_name(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()} threads",
        **{name: f"{name} {version}" for name, version in packages().items()},
    }


def results_of(
    case: str,
    times: Mapping[str, list[float]],
    facts: Callable[[str, list[float]], dict[str, Any]] = lambda side, times: {},
    refused: Mapping[str, str] | None = None,
) -> list[Result]:
    """Of the milliseconds that sides took in each round; ratios are to the first. `refused` says why others have none.

    `facts` are those of a side with these times.
    """
    first = next(iter(times.values()), [])
    return [
        *(
            Result(case, s, Spread.of(t), facts={"ratio": over(t, first), **facts(s, t)})
            for s, t in times.items()
        ),
        *(Result(case, side, note=why) for side, why in (refused or {}).items()),
    ]


def alternate(
    sides: Mapping[str, Callable[[], float]], rounds: int, most_seconds: float = math.inf
) -> dict[str, list[float]]:
    """The milliseconds that each side gives in each round, so that other load hits all sides alike.

    Every second round goes backwards: no side always comes after the same other. A side that has had
    `most_seconds` is left out of later rounds.
    """
    times: dict[str, list[float]] = {side: [] for side in sides}
    order = list(sides)
    for _ in range(rounds):
        for side in order:
            if not times[side] or sum(times[side]) < most_seconds * 1e3:
                times[side].append(sides[side]())
        order.reverse()
    return times


def over(times: Sequence[float], ours: Sequence[float]) -> Spread:
    """How many times as long as ours, round by round, over the rounds that both have."""
    return Spread.of([theirs / own for theirs, own in zip(times, ours, strict=False)])


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def plot_shares(axis: Any, results: Sequence[Result], sides: Sequence[str], of: str) -> None:
    """Bars: the share that each case has `of` something, by side."""
    cases = [*dict.fromkeys(result.case for result in results)]
    axis.figure.set_size_inches(8, 0.35 * len(cases) + 1)
    for i, side in enumerate(sides):
        bars = {cases.index(r.case) + 0.4 * i: r.facts["share"].median for r in results if r.side == side}
        axis.barh([*bars], [*bars.values()], 0.4, label=side)
    axis.axvline(1, color="gray", linewidth=1)
    axis.set(xlabel=f"share of {of}")
    axis.set_yticks([i + 0.2 for i in range(len(cases))], cases)
    axis.invert_yaxis()


def check(found: Sequence[Tensor], gold: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise where one is further from `gold` than the rounding of `dtype` explains."""
    for got, want in zip(found, gold, strict=True):
        error = (got.double() - want.double()).abs().max() / want.abs().max()
        bound = (64 if dtype is torch.float32 else 8) * torch.finfo(dtype).eps
        if not error < bound:
            raise RuntimeError(f"wrong: relative error {error:.2g}, expected below {bound:.2g}")


def keep_freed_memory() -> None:
    """For the rest of the process, so that no side is timed while the system clears pages.

    glibc gives tensors of over 32 MiB back when they are freed: the next results come a page fault for every 4 KiB.
    """
    _set_allocator(trim_threshold=(1 << 31) - 1, mmap_threshold=1 << 30)


def return_freed_memory() -> None:
    """For the rest of the process, so that what was freed before a call is not missing in what the call takes."""
    _set_allocator(trim_threshold=1 << 16, mmap_threshold=1 << 16)


def _set_allocator(trim_threshold: int, mmap_threshold: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(-1, trim_threshold)  # M_TRIM_THRESHOLD
        mallopt(-3, mmap_threshold)  # M_MMAP_THRESHOLD


def above_start(call: Callable[[], Any]) -> float:
    """Peak resident memory during the call above what it was before, in MB (Linux)."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = _status_mb("VmRSS")
    call()
    return _status_mb("VmHWM") - before


def in_a_new_thread(call: Callable[[], Any]) -> None:
    """Threads keep memory of our kernels for their next call: a new one has none yet."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()


def _status_mb(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))
