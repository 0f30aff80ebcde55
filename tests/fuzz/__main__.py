"""As many random calls as there is time for."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings

from . import packed, plain
from .mods import ROUTES

KINDS = {"plain": (plain, plain.several_values), "packed": (packed, packed.several_batches)}


def fuzz(route: str, kind: str, first_seed: int, minutes: float) -> int:
    """Cases until the time is up or one fails: 0 or 1."""
    end = time.monotonic() + 60 * minutes
    count, failed = 0, False
    module, several_calls = KINDS[kind]
    for number in range(first_seed, sys.maxsize):

        @seed(number)
        @settings(
            max_examples=10,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(program=module.programs(route), several=several_calls(route, 6))
        def cases(program, several):
            nonlocal count, failed
            if time.monotonic() > end and not failed:  # a failure is made smaller however long that takes
                return
            count += 1
            try:
                module.check(route, program, several)
            except Exception:
                failed = True
                raise

        try:
            cases()
        except Exception:
            traceback.print_exc()
            again = f"python -m tests.fuzz --route {route} --kind {kind} --seed {number}"
            print(f"{route}, {kind}: seed {number} fails: {again}")
            return 1
        if time.monotonic() > end:
            print(f"{route}, {kind}: {count} programs from seed {first_seed} on, all right", flush=True)
            return 0
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--route", choices=["eager", *ROUTES], help="default: all, each in a process of its own"
    )
    parser.add_argument("--kind", choices=KINDS, help="default: each for half of the time")
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="the first one"
    )
    given = parser.parse_args()
    kinds = [given.kind] if given.kind else list(KINDS)
    if given.route == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported it yet
    if given.route:
        return max(fuzz(given.route, kind, given.seed, given.minutes / len(kinds)) for kind in kinds)
    print(f"seed {given.seed}", flush=True)
    again = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--minutes", str(given.minutes)]
    again += ["--kind", given.kind] if given.kind else []
    processes = [
        subprocess.Popen([*again, "--seed", str(given.seed), "--route", route])
        for route in ("eager", *ROUTES)
    ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
