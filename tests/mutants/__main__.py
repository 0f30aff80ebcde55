"""Single changes that make the product wrong, and whether tests of `make test` find them.

python -m tests.mutants [NAME...] [--jobs 2]    (make mutants)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .changes import CHANGES, Change

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds: one that hangs is found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of those to run, all by default")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    chosen = [c for c in CHANGES if not given.names or any(part in c.name for part in given.names)]
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(given.jobs):
            copies.put(_copied(Path(folder) / str(number)))

        def judged(change: Change) -> tuple[Change, str, float]:
            copy, begun = copies.get(), time.perf_counter()
            try:
                return change, _found(change, copy), time.perf_counter() - begun
            finally:
                copies.put(copy)

        survived = []
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            for change, found, seconds in pool.map(judged, chosen):
                said = found or (f"harmless: {change.harmless}" if change.harmless else "SURVIVED")
                print(f"{said:60.60} {seconds:4.0f} s  {change.name}", flush=True)
                survived += [] if found or change.harmless else [change.name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} found or harmless")
    return 1 if survived else 0


def _copied(to: Path) -> Path:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to


def _found(change: Change, copy: Path) -> str:
    """The first test that fails with the change; empty if none does."""
    file = copy / change.file
    text = file.read_text()
    if text.count(change.old) != 1:
        raise SystemExit(
            f"{change.name}: {change.file} has {text.count(change.old)} places with {change.old!r}"
        )
    file.write_text(text.replace(change.old, change.new))
    try:
        return _first_failure(change, copy)
    finally:
        file.write_text(text)


def _first_failure(change: Change, copy: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not slow and not long and not gpu", *change.tests.split()]
    # A file that changes twice in a second would be taken from its bytecode.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    if "interpreted_" in change.tests:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"{change.tests}: took more than {LIMIT} s"
    if done.returncode not in (0, 1):  # no tests were run, or not even collected
        raise SystemExit(f"{change.name}: {change.tests} could not be run\n{done.stdout[-3000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""


if __name__ == "__main__":
    sys.exit(main())
