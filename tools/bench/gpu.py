"""`flex-inductor bench gpu`: our kernels on this machine's card, next to torch's flex_attention and SDPA.

Each side is checked against uncompiled attention in fp32 before it is timed. Sides take turns, in the opposite order
every second round; shown are the median over the rounds and the middle half of them. The cases come in order of
importance, each in a process of its own, so that one may crash or hang. Those for which no time is left are named.
With --compare our own configs are timed against each other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flex_inductor.lowerings.triton.tables import TABLES

from ..users_code import Refused
from . import gpu_calls, harness
from .gpu_calls import BACKWARD, CASES, FORWARD, Case, Limits, Setting, Side
from .harness import Result, Table, selected
from .workers import Deadline, Failed, Job, Worker, run_all

PREPARING, TIMING = 150.0, 10.0  # seconds that a side may take
FIRST_BATCH, BATCH = 1, 6  # cases that are compiled side by side before they are timed one by one
COLUMNS = ("side", "ms", "over ours", "rate", "share", "aim")
STAGES = (1, 2, 3, 4)
AXES = {"forward": ("descriptors",), "backward_dq": ("coalesced",)}
TRIED_WITH_AXES = 2  # of the plain configs, the fastest
PASS_OF = {"forward": FORWARD, "backward_dq": BACKWARD, "backward_dkdv": BACKWARD}
HELP = "attention kernels on this machine's card"
OPTIONS: dict[str, Any] = {
    "--only": harness.OPTIONS["--only"],
    **harness.rounds(6),
    "--minutes": {"type": float, "default": 6.0, "help": "end after these (default 6)"},
    "--max-autotune": {"action": "store_true", "help": "tune our configs and torch's"},
    "--compare": {"choices": PASS_OF, "help": "time every config of this kernel of ours instead"},
    "--out": {"metavar": "FOLDER", "type": Path, "help": "write report.md and report.json there"},
}


def run(arguments: argparse.Namespace) -> int:
    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    if not torch.cuda.is_available():
        raise Refused("this machine has no GPU that torch can use; `flex-inductor bench static` needs none")
    setting = Setting(rounds=arguments.rounds, mode=gpu_calls.TUNED if arguments.max_autotune else None)
    with Bench(setting, Report(arguments.out), Deadline(arguments.minutes)) as bench:
        if arguments.compare is None:
            bench.table(chosen)
        else:
            compare(bench, chosen[0], arguments.compare)
    return 0


class Report:
    """Lines on the terminal, and the same with all figures in files of a folder, after each step."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.lines: list[str] = []
        self.found: dict[str, Any] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        self.lines += lines
        self._write("report.md", "\n".join(self.lines) + "\n")

    def keep(self, name: str, item: Any) -> None:
        self.found.setdefault(name, []).append(item)
        self._write("report.json", json.dumps(self.found, indent=1))

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            whole = self.folder / f"{name}.new"
            whole.write_text(text)
            whole.replace(self.folder / name)


class Bench:
    """One worker times; the others compile before it does, on as many cores as there are.

    Each result is written at once, so that a later failure loses none.
    """

    def __init__(self, setting: Setting, report: Report, deadline: Deadline, workers: int | None = None):
        self.setting, self.report, self.deadline = setting, report, deadline
        cores = os.cpu_count() or 1
        count = workers or max(1, min(8, cores // 2))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // count)))
        self.workers = [Worker() for _ in range(count)]
        self.timer = Worker() if count > 1 else self.workers[0]
        self.limits = Limits(0.0, 0.0)

    def __enter__(self) -> Bench:
        """What the machine is and can do."""
        facts = self._job(gpu_calls.facts, PREPARING)
        found, self.limits = self.timer.run(facts, self.deadline)
        self.report.keep("machine", found)
        self.report.say(", ".join(found.values()), "")
        return self

    def __exit__(self, *exception: Any) -> None:
        for worker in (self.timer, *self.workers):
            worker.end()

    def _job(self, function: Callable, seconds: float, *arguments: Any) -> Job:
        patience = 10 if self.setting.device == "cpu" else 1  # Triton's interpreter is slow
        return Job(function, (*arguments, self.setting), seconds * patience)

    def table(self, cases: Sequence[Case]) -> None:
        """Ours next to the others."""
        table = Table(COLUMNS, max(len(case.title) + 10 for case in cases))
        self.report.say(*table.head)
        left = [(case, gpu_calls.sides_of(case)) for case in cases]
        size = FIRST_BATCH
        while left and self.deadline.left > 0:
            for result in self.results(left[:size]):
                self.report.say(table.row(result))
            left, size = left[size:], BATCH
        if left:
            self.report.say("", f"No time left for: {', '.join(case.title for case, _ in left)}")

    def results(self, batch: Sequence[tuple[Case, Sequence[Side]]]) -> Iterator[Result]:
        """Sides prepared side by side, then timed in turns, case by case."""
        jobs = [
            self._job(gpu_calls.prepare, PREPARING, case, side) for case, sides in batch for side in sides
        ]
        failed = {
            job.arguments[:2]: str(answer)
            for job, answer in run_all(self.workers, jobs, self.deadline)
            if isinstance(answer, Failed)
        }
        for case, sides in batch:
            reasons = {side: failed[case, side] for side in sides if (case, side) in failed}
            good = [side for side in sides if side not in reasons]
            timed = self._job(gpu_calls.measure, 60 + TIMING * len(good), case, good, self.limits)
            found: list[Result] = []
            try:
                found = self.timer.run(timed, self.deadline) if good else []
            except Failed as failure:
                reasons |= dict.fromkeys(good, f"not timed: {failure}")
            for which in case.passes:
                title = case.title_of(which)
                missing = [Result(title, side.name, note=reason) for side, reason in reasons.items()]
                for result in [*(r for r in found if r.case == title), *missing]:
                    self.report.keep("results", asdict(result))
                    yield result


def compare(bench: Bench, case: Case, kernel: str) -> None:
    """Time the kernel's configs in the pass that it is part of, tiles and stages first, then axes on the best two."""
    bench.report.say("", f"{case.title}: {kernel}", "")
    plain = _fastest(bench, case, kernel, [Side(), *plain_configs(kernel, case, bench.setting.device)])
    best = [side for side, _ in plain[:TRIED_WITH_AXES]]
    found = plain + _fastest(bench, case, kernel, [Side(), *axes_on(kernel, best)])
    if found:
        side, ratio = min(found, key=lambda each: each[1].median)
        bench.report.say("", f"fastest: {side.name}, {ratio} of the default's time")


def plain_configs(kernel: str, case: Case, device: str) -> Iterator[Side]:
    """Every tile of the kernel's tables for this head dim, on any card, with every number of stages."""
    if device == "cpu":  # the interpreter is equally slow with all
        yield Side.of(kernel, block_m=16, block_n=32)
        return
    table, _ = TABLES[kernel]
    tiles: dict[tuple[int, int, int], None] = {}
    for classes in (each for family, each in table.items() if family != "exact"):  # cases are in 16 bits
        width = next((w for w in sorted(classes) if case.head_dim <= w), max(classes))
        tiles |= dict.fromkeys((c.block_m, c.block_n, c.warps) for c in classes[width])
    for m, n, warps in tiles:
        for stages in STAGES:
            yield Side.of(kernel, block_m=m, block_n=n, warps=warps, stages=stages)


def axes_on(kernel: str, sides: Sequence[Side]) -> Iterator[Side]:
    """Each of the sides with every axis that the kernel has."""
    for side in sides:
        for axis in AXES.get(kernel, ()):
            yield Side.of(kernel, **side.sizes(kernel), **{axis: 1})


def _median(result: Result) -> float:
    return result.ms.median if result.ms else math.inf


def _fastest(bench: Bench, case: Case, kernel: str, sides: Sequence[Side]) -> list[tuple[Side, Any]]:
    """The sides that could be timed with their ratios to the default, the fastest first. A line is printed for each."""
    by_name = {side.name: side for side in sides}
    title = case.title_of(PASS_OF[kernel])
    results = [r for r in bench.results([(case, [*by_name.values()])]) if r.case == title]
    timed = sorted((r for r in results if r.ms is not None), key=_median)
    bench.report.say(*(f"    {r.facts['ratio']}  {r.ms} ms  {r.side}" for r in timed))
    bench.report.say(*(f"    --  {r.side}: {r.note}" for r in results if r.ms is None))
    return [(by_name[r.side], r.facts["ratio"]) for r in timed]
