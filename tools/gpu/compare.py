"""Which config and which axes are fastest for a kernel: tiles and stages first, then the axes on the best two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flex_inductor.lowerings.triton.tables import TABLES

from .cases import BACKWARD, FORWARD, Case, Side
from .measure import Result
from .table import Bench

STAGES = (1, 2, 3, 4)
AXES = {"forward": ("descriptors",), "backward_dq": ("coalesced",)}
TRIED_WITH_AXES = 2  # of the plain configs, the fastest
PASS_OF = {
    "forward": FORWARD,
    "backward_dq": BACKWARD,
    "backward_dkdv": BACKWARD,
}


def compare(bench: Bench, case: Case, kernel: str) -> None:
    """Time the kernel's configs in the pass that it is part of, and say which wins over the default."""
    bench.report.say("", f"{case.title}: {kernel}", "")
    plain = rows(bench, case, kernel, [Side(), *plain_configs(kernel, case, bench.setting.device)])
    best = [side for side, _ in plain[:TRIED_WITH_AXES]]
    found = plain + rows(bench, case, kernel, [Side(), *axes_on(kernel, best)])
    found.sort(key=lambda each: each[1].ratio.median)
    if found:
        side, result = found[0]
        bench.report.say("", f"fastest: {side.name}, {result.ratio} of the default's time")


def plain_configs(kernel: str, case: Case, device: str) -> Iterator[Side]:
    """Every tile of the kernel's tables for this head dim, on any card, with every number of stages."""
    table, _ = TABLES[kernel]
    tiles: dict[tuple[int, int, int], None] = {}
    for classes in (
        classes for family, classes in table.items() if family != "exact"
    ):  # cases are in 16 bits
        width = next((w for w in sorted(classes) if case.head_dim <= w), max(classes))
        tiles |= dict.fromkeys((c.block_m, c.block_n, c.warps) for c in classes[width])
    if device == "cpu":  # the interpreter is equally slow with all
        yield Side(configs={kernel: {"block_m": 16, "block_n": 32}})
        return
    for m, n, warps in tiles:
        for stages in STAGES:
            yield Side(configs={kernel: {"block_m": m, "block_n": n, "warps": warps, "stages": stages}})


def axes_on(kernel: str, sides: Sequence[Side]) -> Iterator[Side]:
    """Each of the sides with every axis that the kernel has."""
    for side in sides:
        for axis in AXES.get(kernel, ()):
            sizes = (side.configs or {}).get(kernel, {})
            yield Side(configs={kernel: {**sizes, axis: 1}})


def rows(bench: Bench, case: Case, kernel: str, sides: Sequence[Side]) -> list[tuple[Side, Result]]:
    """The sides that could be timed, the fastest first. A line is printed for each."""
    which = PASS_OF[kernel]
    by_name = {side.name: side for side in sides}
    results = [r for r in bench.results(case, list(by_name.values())) if r.which == which]
    timed = [r for r in results if r.ms is not None]
    for r in sorted(timed, key=lambda r: r.ms.median):
        bench.report.say(f"    {r.ratio}  {r.ms} ms  {r.side}")
    for r in results:
        if r.ms is None:
            bench.report.say(f"    --  {r.side}: {r.note}")
    ours = [(by_name[r.side], r) for r in timed]
    return sorted(ours, key=lambda each: each[1].ms.median)
