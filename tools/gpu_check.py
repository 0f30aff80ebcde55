"""What to measure and check on a new card, in order of importance, in nine minutes.

    speed     the most telling calls, ours next to torch's kernels and SDPA
    compare   configs and axes of our kernels against each other
    correct   calls and gradients against dense attention in fp64, those in fp32 last

It needs torch and triton only. Results are written to the folder of --out after each step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by its path, Python looks beside this file first; the package and the tests' cases are elsewhere.
sys.path[:] = [str(ROOT), str(ROOT / "tests"), *(p for p in sys.path if Path(p).resolve() != ROOT / "tools")]

EXTRAS = ("pytest", "expecttest", "hypothesis", "rich", "pygments", "matplotlib", "flash_attn")
SHARE = {"speed": 0.5, "compare": 0.3, "correct": 0.2}  # of the minutes, where several parts run
CORRECT = 150.0  # seconds that one call may take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    add("--minutes", type=float, default=9.0, help="end after these (default 9)")
    add("--out", metavar="FOLDER", type=Path, default=Path("gpu_check"), help="default gpu_check")
    add("--only", metavar="TEXT", help="cases and calls whose title contains TEXT")
    add("--kernel", metavar="NAME", help="the one kernel whose configs to compare; all by default")
    add("--rounds", type=int, default=6, help="how often each side is timed (default 6)")
    add("--calls", type=int, metavar="N", help="check the first N calls; all by default")
    dry = "tiny calls on the CPU by Triton's interpreter: a test of this script"
    add("--dry", action="store_true", help=dry)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, here and in the workers
    if not (ROOT / "tests" / "card.py").exists():
        parser.error("the calls to check are in tests/: run tools/gpu_check.sh of a checkout")
    missing = [name for name in EXTRAS if not importlib.util.find_spec(name)]

    import torch

    from flex_inductor.tools.bench.gpu import Bench, Report, Setting
    from flex_inductor.tools.bench.workers import Deadline

    if not arguments.dry and not torch.cuda.is_available():
        print("this machine has no GPU that torch can use; --dry runs without one", file=sys.stderr)
        return 2
    setting = Setting("cpu" if arguments.dry else "cuda", arguments.rounds)
    report = Report(arguments.out)
    begin = time.monotonic()
    if missing:
        report.say(f"not installed, and not needed: {', '.join(missing)}")
    with Bench(setting, report, Deadline(arguments.minutes), workers=1 if arguments.dry else None) as bench:
        left = sum(SHARE[part] for part in parts)
        for part, run in PARTS.items():
            if part in parts:
                spent = (time.monotonic() - begin) / 60
                bench.deadline = Deadline((arguments.minutes - spent) * SHARE[part] / left)
                left -= SHARE[part]
                report.say("", f"## {part}", "")
                run(bench, arguments)
    wrong = report.found.get("wrong", [])
    report.say("", f"{len(report.found.get('right', []))} calls right, {len(wrong)} wrong")
    return 1 if wrong else 0


def speed(bench, arguments) -> None:
    from flex_inductor.tools.bench.gpu import CASES

    bench.table(_chosen(CASES, arguments))


def compare(bench, arguments) -> None:
    from flex_inductor.tools.bench import gpu

    for case in _chosen(gpu.CASES, arguments)[:3]:
        for kernel in [arguments.kernel] if arguments.kernel else gpu.PASS_OF:
            if bench.deadline.left > 0:
                gpu.compare(bench, case, kernel)
            else:
                bench.report.say("", f"No time left for {case.title}: {kernel}")


def correct(bench, arguments) -> None:
    import torch
    from card import CALLS, check, without

    from flex_inductor.tools.bench.workers import Failed, Job, Late, run_all

    there = ((9, 0), 2) if arguments.dry else (torch.cuda.get_device_capability(), torch.cuda.device_count())
    calls = _chosen([call for call in CALLS if without(call, *there) is None], arguments)
    jobs = [Job(check, (call, bench.setting), CORRECT) for call in calls[: arguments.calls]]
    for job, answer in run_all(bench.workers, jobs, bench.deadline):
        title = job.arguments[0].title
        if isinstance(answer, Late):
            bench.report.say(f"No time left for: {title}")
        elif isinstance(answer, Failed):
            bench.report.keep("wrong", {"call": title, "reason": str(answer)})
            bench.report.say(f"WRONG  {title}: {answer}")
        else:
            bench.report.keep("right", title)


def _chosen(cases, arguments):
    from flex_inductor.tools.bench.harness import selected

    found = selected(cases, arguments.only)
    return [*{case.small().title: case.small() for case in found}.values()] if arguments.dry else found


PARTS = {"speed": speed, "compare": compare, "correct": correct}

if __name__ == "__main__":
    raise SystemExit(main())
