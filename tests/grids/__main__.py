"""A sample of published test parameters, all of them, or one case."""

from __future__ import annotations

import argparse
import math
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import rich
from rich.table import Table

from . import crew
from .record import Record
from .suite import Group, hashed
from .tables import SUITES

SAMPLE = 2000
FROM_EACH = 60  # cases of a group in a sample: compiling its kernels takes the time of many more


def sample(count: int, names: list[str]) -> list[tuple[Group, list[int]]]:
    """`count` cases. Each is as likely as any other to be in it; the same ones every time.

    Groups are drawn as often as they are large, and of each some cases.
    """
    draws = random.Random(2026)
    suites = [SUITES[name] for name in names]
    sizes = [suite.product() for suite in suites]
    chosen: dict[tuple[str, int], list[int]] = {}
    while sum(map(len, chosen.values())) < count:
        (suite,) = draws.choices(suites, sizes)
        number = draws.randrange(suite.product())
        if suite.skips(suite.case(number)):
            continue
        group = suite.group_of(number)
        if (suite.name, group.number) not in chosen:
            left = count - sum(map(len, chosen.values()))
            chosen[suite.name, group.number] = group.cases()[: min(FROM_EACH, left)]
    return [
        (Group(SUITES[name], number, SUITES[name].places(number)), cases)
        for (name, number), cases in chosen.items()
    ]


def whole(names: list[str], record: Record, first: int = 0) -> Iterator[tuple[Group, list[int]]]:
    """What the record has not, from the group with the place `first` on."""
    for group in order(names)[first:]:
        cases = group.cases()[record.done.get((group.suite.name, group.number), 0) :]
        if cases:
            yield group, cases


def order(names: list[str]) -> list[Group]:
    """All groups, drawn one after another as often as they are large: the first are a sample of all cases."""

    def place(group: Group) -> float:
        draw = (hashed("order", group.suite.name, group.number) + 1) / 2**64
        return -math.log(draw) / group.suite.cases_of_a_group()

    return sorted((group for name in names for group in SUITES[name].groups()), key=place)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.grids", description=__doc__)
    parser.add_argument("--cases", type=int, default=SAMPLE, help=f"of the sample, {SAMPLE} by default")
    parser.add_argument("--whole", action="store_true", help="all cases that the record has not")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the place of a whole run's first group, if others did those before",
    )
    parser.add_argument("--record", type=Path, default=Path("build/grids.jsonl"), help="of a whole run")
    parser.add_argument("--suites", default="", help="those whose names begin so")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--case", action="append", help="one case by its id, in this process")
    parser.add_argument("--counts", action="store_true", help="how many cases each suite has")
    given = parser.parse_args()
    names = [name for name in SUITES if name.startswith(given.suites)]
    if given.counts:
        return _counts(names)
    if given.case:
        return max(_one(case_id) for case_id in given.case)
    record = Record(given.record if given.whole else None)
    before = sum(record.done.values())
    if given.whole:
        total = sum(len(group.cases()) for name in names for group in SUITES[name].groups())
        work = whole(names, record, given.first)
    else:
        chosen = sample(given.cases, names)
        total, work = sum(len(cases) for _, cases in chosen), iter(chosen)
    crew.run(work, record, given.workers, before, total)
    return _report(record, before, total)


def _one(case_id: str) -> int:
    from . import one

    name, _, number = case_id.rpartition("-")
    group = SUITES[name].group_of(int(number))
    print(SUITES[name].case(int(number)), one.way_of(group))
    one.settings()
    ((outcome, why),) = one.outcomes(group, [int(number)])
    print(outcome, why)
    return int(outcome == "failed")


def _counts(names: list[str]) -> int:
    table = Table("suite", "product", "cases", "groups")
    totals = [0, 0, 0]
    for name in names:
        sizes = [len(group.cases()) for group in SUITES[name].groups()]
        row = SUITES[name].product(), sum(sizes), sum(map(bool, sizes))
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        table.add_row(name, *(f"{n:,}" for n in row))
    table.add_row("all", *(f"{n:,}" for n in totals))
    rich.print(table)
    return 0


def _report(record: Record, before: int, total: int) -> int:
    done, refused = sum(record.done.values()), record.reasons()
    for (suite, reason), count in sorted(refused.items()):
        print(f"refused: {count} of {suite}: {reason}")
    for case_id, why in record.failed.items():
        print(f"failed: python -m tests.grids --case {case_id}\n        {why}")
    print(
        f"{done} cases of {total}, {done - before} of them now: {done - len(record.failed) - sum(refused.values())} "
        f"right, {sum(refused.values())} refused, {len(record.failed)} failed; {_core_seconds():.0f} seconds of a core"
    )
    return int(bool(record.failed))


def _core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
