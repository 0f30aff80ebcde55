"""Timing the sides of a case in rounds, so that other load hits them alike."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def keep_freed_memory() -> None:
    """For the rest of the process, so that no side is timed while the system clears pages.

    glibc gives tensors of over 32 MiB back when they are freed: the next results come a page fault for every 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(mmap_threshold, 1 << 30)


def alternate(
    sides: Mapping[str, Callable[[], float]], rounds: int, most_seconds: float = math.inf
) -> dict[str, list[float]]:
    """The milliseconds that each side gives in each round.

    Every second round goes backwards, so that no side always comes after the same other. A side that has had
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
    """How many times as long as ours, round by round."""
    return Spread.of([theirs / own for theirs, own in zip(times, ours, strict=True)])


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
