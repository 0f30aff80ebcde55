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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..files import at_least_one, to_write

Case = TypeVar("Case")
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


def command(
    kinds: Any,
    name: str,
    help: str,
    doc: str | None,
    run: Callable[[argparse.Namespace], int],
    rounds: int | None = None,
) -> argparse.ArgumentParser:
    """A subcommand of bench, with the options that all have; with --rounds if `rounds` says how many."""
    parser = kinds.add_parser(name, help=help, description=doc)
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument(
        "--json", metavar="FILE", type=to_write, help="write the results ('-': to standard output)"
    )
    if rounds is not None:
        text = f"how often each side is timed (default {rounds})"
        parser.add_argument("--rounds", type=at_least_one, default=rounds, metavar="N", help=text)
    parser.set_defaults(run=run)
    return parser


def run_cases(
    cases: Sequence[Case],
    measure: Callable[[Case], Iterable[Result]],
    arguments: argparse.Namespace,
    columns: Sequence[str] = ("side", "ms", "over ours"),
    title: Callable[[Case], str] = attrgetter("title"),
) -> list[Result]:
    """Measure the chosen cases, print a row for each result as it comes, and write the file of --json."""
    chosen = selected(cases, arguments.only, title)
    table = Table(columns, max(map(len, map(title, chosen)), default=0))
    quiet = arguments.json == "-"
    results: list[Result] = []
    if chosen and not quiet:
        print(", ".join(map(str, machine().values())), "", *table.head, sep="\n", flush=True)
    for case in chosen:
        for result in measure(case):
            results.append(result)
            if not quiet:
                print(table.row(result), flush=True)
    if chosen and arguments.json:
        options = {name: value for name, value in vars(arguments).items() if not callable(value)}
        found = {"machine": machine(), "options": options, "results": [*map(asdict, results)]}
        text = json.dumps(found, indent=2)
        if quiet:
            print(text)
        else:
            with open(arguments.json, "w") as file:
                file.write(text + "\n")
    return results


def selected(
    cases: Sequence[Case], only: str | None, title: Callable[[Case], str] = attrgetter("title")
) -> list[Case]:
    """Those whose title contains `only`. If there is none, stderr names all."""
    found = [case for case in cases if not only or only in title(case)]
    if not found:
        titles = "\n  ".join(map(title, cases))
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
    from ..env import cpu_name, versions

    return {
        "cpu": cpu_name(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()} threads",
        **{fact.name: f"{fact.name} {fact.text}" for fact in versions() if fact.name != "python"},
    }


def timed(
    case: str,
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    facts: Callable[[str, list[float]], dict[str, Any]] = lambda side, times: {},
    refused: Mapping[str, str] | None = None,
    most_seconds: float = math.inf,
) -> list[Result]:
    """The sides in turns; each gives its milliseconds. Ratios are to the first. `refused` says why others have none.

    `facts` are those of a side with these times.
    """
    return [
        *results_of(case, alternate(sides, rounds, most_seconds), facts),
        *(Result(case, side, note=why) for side, why in (refused or {}).items()),
    ]


def results_of(
    case: str,
    times: Mapping[str, list[float]],
    facts: Callable[[str, list[float]], dict[str, Any]] = lambda side, times: {},
) -> list[Result]:
    """Of the milliseconds that sides took in each round."""
    first = next(iter(times.values()), [])
    return [
        Result(case, side, Spread.of(of), facts={"ratio": over(of, first), **facts(side, of)})
        for side, of in times.items()
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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(mmap_threshold, 1 << 30)


def above_start(call: Callable[[], Any]) -> float:
    """Peak resident memory during the call above what it was before, in MB (Linux)."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = _status_mb("VmRSS")
    call()
    return _status_mb("VmHWM") - before


def _status_mb(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))
