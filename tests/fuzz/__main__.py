"""As many random calls as there is time for, each route in a process of its own."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from . import packed, plain, spread
from .mods import CARD, ROUTES
from .smaller import smaller

ALL = ("eager", *ROUTES)
KINDS = {
    "plain": (plain, plain.several_values, ALL),
    "packed": (packed, packed.several_batches, ALL),
    "spread": (spread, spread.several_values, ("eager",)),
}
# Of a program. Executed kernels are slow.
CALLS = {"eager": 12, "chunked": 200, "cpu": 400, CARD: 30}


def fuzz(route: str, kind: str, first_seed: int, minutes: float) -> int:
    """Programs until the time is up or one fails: 0 or 1."""
    end = time.monotonic() + 60 * minutes
    programs, calls, failing = 0, 0, None
    module, several_calls, _ = KINDS[kind]
    for number in range(first_seed, sys.maxsize):

        @seed(number)
        @settings(
            max_examples=40,  # the first ones are trivial
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],  # `smaller` takes less time than hypothesis, of which each step compiles
            suppress_health_check=list(HealthCheck),
        )
        @given(program=module.programs(route), several=several_calls(route, CALLS.get(route, 6)))
        def cases(program, several):
            nonlocal programs, calls, failing
            if time.monotonic() > end:
                return
            programs += 1
            calls += len(several)
            try:
                module.check(route, program, several)
            except Exception:
                failing = program, several
                raise

        try:
            cases()
        except Exception:
            traceback.print_exc()
            if route != CARD:  # whose time is dear
                failing = smaller(functools.partial(module.check, route), *failing)
            path = Path("build/fuzz") / f"{route}-{kind}-{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(script(route, kind, *failing))
            print(
                f"{route}, {kind}: seed {number} fails after {calls} calls: python -m build.fuzz.{path.stem}"
            )
            print(path.read_text(), flush=True)
            return 1
        if time.monotonic() > end:
            print(
                f"{route}, {kind}: {calls} calls of {programs} programs from seed {first_seed} on, all right",
                flush=True,
            )
            return 0
    return 0


def script(route: str, kind: str, program: Any, several: list) -> str:
    """What runs these calls again."""
    names = ", ".join(sorted({kind, "plain"}))
    lines = [f"from tests.fuzz import {names}", "", f"program = {_text(program)}"]
    lines += [f"several = [{', '.join(map(_text, several))}]"]
    # Ranks are processes that import this script.
    lines += ['if __name__ == "__main__":', f'    {kind}.check("{route}", program, several)']
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """A NamedTuple of this package, with the fields that are not the defaults."""
    if not hasattr(value, "_field_defaults"):
        return repr(value)
    module = type(value).__module__.rpartition(".")[2]
    defaults = value._field_defaults
    fields = [f"{name}={_text(of)}" for name, of in value._asdict().items() if of != defaults.get(name)]
    return f"{module}.{type(value).__name__}({', '.join(fields)})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--route", choices=[*ALL, CARD], help=f"default: all but {CARD}, which needs one")
    parser.add_argument("--kind", choices=KINDS, help="default: each for as long")
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="the first one"
    )
    given = parser.parse_args()
    if given.route == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported it yet
    if given.route:
        like = "triton" if given.route == CARD else given.route
        kinds = [kind for kind, (_, _, routes) in KINDS.items() if like in routes]
        kinds = [given.kind] if given.kind else kinds
        return max(fuzz(given.route, kind, given.seed, 60 * given.hours / len(kinds)) for kind in kinds)
    print(f"seed {given.seed}", flush=True)
    again = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--hours", str(given.hours)]
    again += ["--kind", given.kind] if given.kind else []
    routes = KINDS[given.kind][2] if given.kind else ALL
    processes = [subprocess.Popen([*again, "--seed", str(given.seed), "--route", route]) for route in routes]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
