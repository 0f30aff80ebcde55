"""Which tests take long: those in long.txt. `make test` leaves them to `make test-long`.

    python -m tests.long REPORT.xml... [--seconds 800]

writes the list anew, from reports of pytest (--junitxml): the slowest tests, until the others take no more time of a core
than that. Tests without a report stay where they are, and a change of tests/mutants keeps the test that it names quick.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.changes import CHANGES

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("long.txt")
STARTS_OTHERS = "tests/lowerings/triton/test_interpreted.py::test_numerics[not slow and not long]"
KEPT = {STARTS_OTHERS, *(name for change in CHANGES for name in change.tests.split() if "::" in name)}


def listed() -> set[str]:
    return set(LIST.read_text().splitlines())


def chosen(times: dict[str, float], seconds: float) -> set[str]:
    """The slowest, until the others take no longer than `seconds` together."""
    rest, found = sum(times.values()), set()
    for name, taken in sorted(times.items(), key=lambda item: -item[1]):
        if rest <= seconds:
            break
        rest -= taken
        found.add(name)
    return found


def times_in(reports: Iterable[Path]) -> dict[str, float]:
    cases = (case for report in reports for case in ElementTree.parse(report).iter("testcase"))
    times = {
        _node(case.get("classname", ""), case.get("name", "")): float(case.get("time", 0)) for case in cases
    }
    return {name: taken for name, taken in times.items() if name not in KEPT}


def _node(classname: str, name: str) -> str:
    """The test's name for pytest. The report has the names of the file and of a class with points between them."""
    parts = classname.split(".")
    count = next(n for n in range(len(parts), 0, -1) if Path(ROOT, *parts[:n]).with_suffix(".py").exists())
    return "::".join([str(Path(*parts[:count]).with_suffix(".py")), *parts[count:], name])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=800)
    given = parser.parse_args()
    times = times_in(given.reports)
    names = chosen(times, given.seconds) | (listed() - times.keys() - KEPT)
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"{len(names)} of {len(times | dict.fromkeys(names, 0.0))} take long")


if __name__ == "__main__":
    main()
