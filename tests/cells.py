"""Which test proves what: `make support` writes docs/support.md, a table of all that tests have served and judged.

A cell is an operation, dtype, route and direction. While a test runs, every call that a route takes adds its cells; they
count if the test passes and compares numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

OPERATIONS = {
    "plain": "no mods, nothing else",
    "score_mod": "a score_mod",
    "score_captures": "a score_mod with captured tensors",
    "mask_mod": "a mask_mod",
    "lists": "a BlockMask",
    "runs": "a RunSchedule",
    "bounds": "a mask in closed form",
    "groups": "grouped heads",
    "dims": "values of another head dim",
    "tile_map": "packed sequences",
    "scattered": "keys in rows or pages",
    "sinks": "sinks",
    "dropout": "dropout",
    "kv_scales": "keys and values of 8 bits",
    "entropy": "entropy",
    "grad_entropy": "entropy's gradient",
    "max_indices": "max_indices",
    "column_sums": "column_sums",
}
ROUTES = ("eager", "chunked", "cpu", "triton")
DIRECTIONS = ("forward", "backward")
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Cell = tuple[str, str, str, str]
_found: set[Cell] = set()  # of the test at hand
_judged: set[str] = set()


def begin() -> None:
    _found.clear()
    _judged.clear()


def served() -> list[Cell]:
    return sorted(_found)


def end() -> list[Cell]:
    """What the test has served, if it compared numbers."""
    return served() if _judged else []


def add(cells: Iterable[Cell]) -> None:
    """Those of another process."""
    _found.update(map(tuple, cells))  # type: ignore[arg-type]


def watch() -> None:
    """Look at what the routes take from now on."""
    from flex_inductor.compat import when_imported

    for module, name, seen in (
        ("flex_inductor.lowerings.registry", "decide", _decided),
        ("flex_inductor.op.eager.kernels", "run", _ran),
        ("tests.support", "assert_accurate", _compared),
        ("support", "assert_accurate", _compared),
        ("torch.testing", "assert_close", _compared),
    ):
        when_imported(module, functools.partial(_watched, name=name, seen=seen))


def _watched(module: Any, name: str, seen: Callable) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        seen(result, *args)
        return result

    setattr(module, name, watched)


def _compared(*_: Any) -> None:
    _judged.add("")


def _decided(result: Any, problem: Any, _: Any) -> None:
    from flex_inductor.lowerings.problem import AttentionProblem

    if not isinstance(problem, AttentionProblem):  # a test's own
        return
    operations = {*problem.inputs, *problem.outputs, problem.schedule}
    operations |= {f"{name}_mod" for name in ("score", "mask") if getattr(problem.programs, name) is not None}
    if problem.H != problem.K:
        operations.add("groups")
    if problem.D != problem.V:
        operations.add("dims")
    _add(operations, problem.dtype, result[0].name, problem.direction)


def _ran(_: Any, call: Any, chunked: Any) -> None:
    inputs = call.inputs
    operations = {*inputs.given(), *getattr(call.options, "more", ())}
    operations |= {name for name in ("score_mod", "mask_mod") if getattr(call, name) is not None}
    if inputs.schedule is not None:
        operations.add(inputs.schedule.form)
    if call.query.size(1) != call.key.size(1):
        operations.add("groups")
    if call.query.size(-1) != call.value.size(-1):
        operations.add("dims")
    _add(operations, call.query.dtype, "eager", "backward" if hasattr(call, "grad_out") else "forward")


def _add(operations: set[Any], dtype: Any, route: str, direction: str) -> None:
    known = operations & OPERATIONS.keys() or {"plain"}
    _found.update((operation, str(dtype).removeprefix("torch."), route, direction) for operation in known)


# What the tests of a run have found.


class Watching:
    """The part of pytest: a worker adds to each report what its test has found, the controller keeps that."""

    def __init__(self, path: Path, is_worker: bool):
        self.path, self.is_worker = path, is_worker
        self.by_test: dict[str, list[Cell]] = {}
        watch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        begin()
        yield
        item.user_properties.append(("cells", end()))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and (found := dict(report.user_properties).get("cells")):
            self.by_test[report.nodeid] = found

    def pytest_sessionfinish(self):
        if not self.is_worker:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.by_test, indent=0))


def table(by_test: dict[str, list[Cell]]) -> str:
    """For each cell the test that has the fewest other ones: it is the most about this one."""
    proof: dict[Cell, str] = {}
    for test in sorted(by_test, key=lambda test: (len(by_test[test]), test)):
        for cell in by_test[test]:
            proof.setdefault(tuple(cell), test)  # type: ignore[arg-type]
    columns = [(route, direction) for route in ROUTES for direction in DIRECTIONS]
    lines = [f"| | {' | '.join(map(' '.join, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for operation, text in OPERATIONS.items():
        row = []
        for column in columns:
            tests = {name: proof.get((operation, dtype, *column)) for dtype, name in DTYPES.items()}
            row.append(" ".join(_link(name, test) for name, test in tests.items() if test))
        lines.append(f"| {text} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _link(name: str, test: str) -> str:
    path, _, function = test.partition("::")
    title = function.translate({ord(letter): None for letter in '"|'})
    return f'[{name}](../{path} "{title}")'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cells", description=__doc__)
    parser.add_argument("found", nargs="+", type=Path, help="what runs of the tests have left")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    by_test = {test: cells for path in given.found for test, cells in json.loads(path.read_text()).items()}
    page = given.out.read_text() if given.out.exists() else "|"
    given.out.write_text(page[: page.index("|")] + table(by_test))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
