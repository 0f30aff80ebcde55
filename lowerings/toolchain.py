"""Tools for compiling beside torch, and the command that installs a missing one."""

from __future__ import annotations

import functools
import re
import sysconfig
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import torch


def missing_for_cpp() -> str | None:
    """Why no C++ kernel can be compiled here; None if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        named = re.findall(r"'([^']+)'", str(error))
        tried = f" ({named[-1]!r} does not run)" if named else ""
        return f"no C++ compiler{tried}: install one (apt install g++), or set CXX to its path"
    return missing_headers()


@functools.cache
def missing_headers() -> str | None:
    torchs = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vec" / "vec.h"
    if not torchs.exists():
        return (
            f"this build of torch has no C++ headers ({torchs} is missing): install one that has them "
            f"(pip install --force-reinstall torch=={torch.__version__.partition('+')[0]})"
        )
    pythons = Path(sysconfig.get_path("include"), "Python.h")
    if not pythons.exists():
        return f"Python's headers are missing ({pythons}): install them (apt install python3-dev)"
    return None


@functools.cache
def missing_for_triton() -> str | None:
    """Why Triton compiles nothing here; None if it may."""
    pin = re.compile(r"[\w-]*\btriton\b[\w-]*[=~]=(\d+\.\d+)[\d.]*")
    pinned = [pin.match(needed) for needed in requires("torch") or ()]
    wanted = next((match for match in pinned if match), None)
    install = f"pip install '{wanted[0]}'" if wanted else "pip install triton"
    found = version_of("triton")
    if found is None:
        return f"triton is not installed ({install})"
    if wanted and not found.startswith(f"{wanted[1]}."):
        return f"triton {found} does not fit torch {torch.__version__} ({install})"
    return None


@functools.cache
def version_of(module: str) -> str | None:
    """Of what is installed under any name: triton for ROCm comes as triton-rocm, nightly builds as pytorch-triton."""
    try:
        return version(module)
    except PackageNotFoundError:
        names = packages_distributions().get(module)  # takes a while: it reads what all have installed
        return version(names[0]) if names else None
