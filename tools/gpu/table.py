"""Runs cases in workers, most telling first, and writes each result at once, so that a later failure loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..workers import Call, Deadline, Failed, Workers
from .cases import OTHERS, OURS, Case, Side, sides_of
from .measure import Limits, Result, Setting, machine, measure, prepare

PREPARING, TIMING = 150.0, 10.0  # seconds that a side may take
FIRST_BATCH, BATCH = 1, 6  # cases that are compiled side by side before they are timed one by one


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
    """One worker times; the others compile before it does, on as many cores as there are."""

    def __init__(self, setting: Setting, report: Report, deadline: Deadline, workers: int | None = None):
        self.setting, self.report, self.deadline = setting, report, deadline
        cores = os.cpu_count() or 1
        count = workers or max(1, min(8, cores // 2))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // count)))
        self.workers = Workers(count)
        self.timer = Workers(1) if count > 1 else self.workers
        self.limits = Limits(0.0, 0.0)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.timer.__exit__(*exception)
        self.workers.__exit__(*exception)

    def start(self) -> None:
        """What the machine is and can do."""
        facts, self.limits = self.timer.run(Call(machine, (self.setting,), PREPARING), self.deadline)
        self.report.keep("machine", facts)
        self.report.say(", ".join(facts.values()), "")

    def results(self, case: Case, sides: Sequence[Side]) -> list[Result]:
        """Of one case: prepared side by side, then timed in turns."""
        (found,) = self._batch([(case, sides)])
        return found[1]

    def table(self, cases: Sequence[Case]) -> None:
        """Ours next to the others."""
        self.report.say(
            "| case | pass | ours ms | rate | share | " + " | ".join(OTHERS) + " | aims |",
            "| --- " * (6 + len(OTHERS)) + "|",
        )
        left = [(case, sides_of(case)) for case in cases]
        notes: dict[str, None] = {}
        size = FIRST_BATCH
        while left and self.deadline.left > 0:
            for case, results in self._batch(left[:size]):
                self.report.say(*lines_of(case, results))
                notes |= dict.fromkeys(f"{r.case}, {r.side}: {r.note}" for r in results if r.note)
            left, size = left[size:], BATCH
        if left:
            self.report.say("", f"No time left for: {', '.join(case.title for case, _ in left)}")
        if notes:
            self.report.say("", *notes)

    def _batch(self, batch: Sequence[tuple[Case, Sequence[Side]]]) -> Iterator[tuple[Case, list[Result]]]:
        calls = [
            Call(prepare, (case, side, self.setting), PREPARING) for case, sides in batch for side in sides
        ]
        failures = {
            (call.arguments[0], call.arguments[1].name): str(answer)
            for call, answer in self.workers.run_all(calls, self.deadline)
            if isinstance(answer, Failed)
        }
        for case, sides in batch:
            good = [side for side in sides if (case, side.name) not in failures]
            results = self._timed(case, good) if good else []
            for side in sides:
                if reason := failures.get((case, side.name)):
                    results += [
                        Result(case.title, which, side.name, None, note=reason) for which in case.passes
                    ]
            for result in results:
                self.report.keep("results", asdict(result))
            yield case, results

    def _timed(self, case: Case, sides: list[Side]) -> list[Result]:
        call = Call(measure, (case, sides, self.setting, self.limits), 60 + TIMING * len(sides))
        try:
            return self.timer.run(call, self.deadline)
        except Failed as failure:
            reason = f"not timed: {failure}"
            return [
                Result(case.title, which, side.name, None, note=reason)
                for which in case.passes
                for side in sides
            ]


def lines_of(case: Case, results: Iterable[Result]) -> Iterator[str]:
    """Rows of the table: what the other sides take, over ours."""
    for which in case.passes:
        by_side = {r.side: r for r in results if r.which == which}
        ours = by_side.get(OURS)
        others = []
        for name in OTHERS:
            side = by_side.get(name)
            if side is None:
                others.append("")
            elif side.ms is None:
                others.append("no")
            else:
                known = ours is not None and ours.ms is not None
                others.append(f"{side.ratio}x" if known else f"{side.ms} ms")
        own = ["failed", "", ""]
        if ours is not None and ours.ms is not None:
            unit = "GB/s" if case.decoding else "TFLOP/s"
            own = [str(ours.ms), f"{ours.rate:.0f} {unit}", f"{ours.share:.0%}"]
        aims = ", ".join(f"{side} {aim:g}" for (of, side), aim in case.aims.items() if of == which)
        yield f"| {' | '.join([case.title, which, *own, *others, aims])} |"
