"""Builds the sdist and the wheel, and tries the wheel in environments that hold nothing else.

python -m tests.release [--torch 2.11.0 2.15.0] [--keep]    (make release-check)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from flex_inductor.fingerprint import VERSION
from flex_inductor.supported import NEWEST, OLDEST

from .archives import faults_of_sdist, faults_of_wheel

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "release"
DISK = 14e9  # bytes that an environment with torch for CUDA takes while pip unpacks it


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    ends = [f"{major}.{minor}.0" for major, minor in (OLDEST, NEWEST)]
    parser.add_argument("--torch", nargs="*", default=ends, help="versions to try the wheel on")
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/release")
    given = parser.parse_args()
    begun = time.perf_counter()
    wheel = built()
    print(f"{wheel.name} is as it should be ({seconds(begun)})", flush=True)
    for version in given.torch:
        tried(wheel, version, given.keep)
    print(f"flex_inductor {VERSION} may be released ({seconds(begun)})")
    return 0


def built() -> Path:
    """The wheel, which is built from the sdist. Ends the process where either is not as it should be."""
    dist = BUILD / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)], cwd=ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], cwd=ROOT)
    listed = run(["git", "ls-files"], cwd=ROOT).splitlines()
    faults = [*faults_of_sdist(sdist, VERSION, listed), *faults_of_wheel(wheel, VERSION)]
    if faults:
        raise SystemExit("\n".join(faults))
    return wheel


def tried(wheel: Path, version: str, keep: bool) -> None:
    """Install the wheel beside this torch and nothing else, and use it away from the checkout."""
    free = shutil.disk_usage(BUILD).free
    if free < DISK:
        raise SystemExit(
            f"{BUILD} has {free / 1e9:.0f} GB of room, an environment takes {DISK / 1e9:.0f}: make room, "
            "or try fewer versions of torch at once (--torch)"
        )
    place = BUILD / f"torch-{version}"
    shutil.rmtree(place, ignore_errors=True)
    try:
        begun = time.perf_counter()
        run([sys.executable, "-m", "venv", str(place)])
        python = str(place / "bin" / "python")
        run([python, "-m", "pip", "install", "--quiet", str(wheel), f"torch=={version}"])
        run([python, "-m", "pip", "check"])
        print(f"installed beside torch {version} ({seconds(begun)})", flush=True)
        with tempfile.TemporaryDirectory() as elsewhere:
            shutil.copy(Path(__file__).with_name("quick.py"), elsewhere)
            print(run([python, "-I", "-W", "ignore", "quick.py", VERSION, version], cwd=elsewhere), end="")
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def run(command: Sequence[str], cwd: str | Path = "/") -> str:
    """What a command prints. Ends the process, with all that it printed, where the command fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds(begun: float) -> str:
    return f"{time.perf_counter() - begun:.0f} s"


if __name__ == "__main__":
    raise SystemExit(main())
