"""Workers, each a process of its own: one that dies has failed the case it was at, and another goes on."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .record import Record
from .suite import Group

GROUPS_EACH = 40  # of a process: what it has compiled stays in its memory
EVERY = 5.0  # seconds between entries of the record
CXX = Path(__file__).parents[1] / "cxx" / "quick" / "g++"

Work = tuple[Group, list[int]]


def run(work: Iterator[Work], record: Record, workers: int, before: int, total: int) -> None:
    """All of `work`, by so many workers at a time."""
    crew = _Crew(work, record, _Shown(before, total))
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(workers)]
    with crew.shown.progress:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
    if crew.broken:
        raise crew.broken[0]


class _Crew:
    def __init__(self, work: Iterator[Work], record: Record, shown: _Shown) -> None:
        self.work, self.record, self.shown = work, record, shown
        self.lock = threading.Lock()
        self.broken: list[BaseException] = []

    def serve(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.broken.append(error)

    def _serve(self) -> None:
        process, served, left = None, 0, None
        while not self.broken:
            with self.lock:
                item = left or next(self.work, None)
            if item is None:
                break
            process = process or _Process()
            left, served = self._group(process, *item), served + 1
            if left or served == GROUPS_EACH:
                process.end()
                process, served = None, 0
        if process is not None:
            process.end()

    def _group(self, process: _Process, group: Group, cases: list[int]) -> Work | None:
        """Has these cases run; what is left of them if the process dies."""
        name, key = group.suite.name, (group.suite.name, group.number)
        process.send([name, group.number, cases])
        count, refused = self.record.done.get(key, 0), collections.Counter(self.record.refused.get(key, {}))
        written = time.monotonic()
        for place, number in enumerate(cases):
            line = process.receive()
            outcome, why = line[1:] if line else ("failed", process.death())
            count += 1
            refused[why] += outcome == "refused"
            with self.lock:
                if outcome == "failed":
                    self.record.write_failed(f"{name}-{number}", why)
                    self.shown.progress.console.print(f"failed: {name}-{number}: {why}", markup=False)
                if not line or place + 1 == len(cases) or time.monotonic() > written + EVERY:
                    self.record.write_done(name, group.number, count, dict(+refused))
                    written = time.monotonic()
                self.shown.one_more(outcome)
            if not line and place + 1 < len(cases):
                return group, cases[place + 1 :]
        return None


class _Process:
    """A worker, with a folder for what it compiles."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="grids-", ignore_cleanup_errors=True)
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": self.folder.name,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0",
            # Keeps memory: fresh pages for each matrix of scores would take a third of a case's time.
            "MALLOC_MMAP_THRESHOLD_": str(2**26),
            "MALLOC_TRIM_THRESHOLD_": str(2**30),
        }
        environment.setdefault("CXX", str(CXX))
        command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.worker"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process: Any = subprocess.Popen(command, env=environment, text=True, **pipes)

    def send(self, group: list) -> None:
        self.process.stdin.write(json.dumps(group) + "\n")
        self.process.stdin.flush()

    def receive(self) -> list | None:
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def death(self) -> str:
        code = self.process.wait()
        return f"the process died, {f'by signal {-code}' if code < 0 else f'with status {code}'}"

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


class _Shown:
    """A line of progress, or one a minute where there is no terminal."""

    def __init__(self, before: int, total: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}")
        console = Console()
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("cases", total=total, completed=before, said="")
        self.before, self.done, self.total = before, before, total
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.began = self.told = time.monotonic()

    def one_more(self, outcome: str) -> None:
        self.done += 1
        self.outcomes[outcome] += 1
        now = time.monotonic()
        speed = (self.done - self.before) / max(now - self.began, 1e-9)
        hours, minutes = divmod(int((self.total - self.done) / speed / 60), 60)
        said = f"{speed:.1f} a second, {hours}:{minutes:02} left, {dict(self.outcomes)}"
        self.progress.update(self.task, completed=self.done, said=said)
        if self.progress.disable and now > self.told + 60:
            self.told = now
            print(f"{self.done} of {self.total}: {said}", flush=True)
