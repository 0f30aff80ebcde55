"""Builds the machine once and calls it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "machine"
FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-march=native")


class Found(ctypes.Structure):
    """What the machine says of a fault."""

    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 480),
        *((name, ctypes.c_int64) for name in ("line", "block", "warp", "lane", "address")),
    ]


@functools.cache
def machine() -> ctypes.CDLL:
    compiler = os.environ.get("CXX", "g++")
    key = hashlib.sha256()
    for path in sorted(FOLDER.iterdir()):
        key.update(path.read_bytes())
    key.update(" ".join((compiler, *FLAGS, platform.machine(), _processor())).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "flex_inductor", "ptx")
    library = cache / f"{key.hexdigest()[:32]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder, "machine.so")
            command = [compiler, *FLAGS, str(FOLDER / "machine.cpp"), "-o", str(built)]
            try:
                subprocess.run(command, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                why = getattr(error, "stderr", None) or error
                raise RuntimeError(
                    f"ptx: {compiler} cannot build the machine. Install a compiler of C++17, or name one in CXX. {why}"
                ) from error
            built.replace(library)
    return ctypes.CDLL(str(library))


def _processor() -> str:
    """What instructions it has, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
