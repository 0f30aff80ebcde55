"""Identifies this code: the version, a hash of all code that decides what is generated, and the CPU it is for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

VERSION = "0.2.0"


def fingerprint(places: Iterable[Path]) -> str:
    """The version, then a hash of the names and contents of every source file and template in or at `places`."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".jinja", ".h"):
                digest.update(str(path.relative_to(place.parent)).encode())
                digest.update(path.read_bytes())
    return f"{VERSION}+{digest.hexdigest()[:16]}"


def _generating_code() -> list[Path]:
    names = ("mod_ir", "op", "masks", "visits", "softmax", "compat.py", "options.py")
    places = [Path(__file__).parent / name for name in names]
    for name in ("lowerings", "templates"):
        spec = find_spec(f"flex_inductor.{name}")
        assert spec is not None and spec.origin is not None, f"flex_inductor.{name} is not installed"
        places.append(Path(spec.origin).parent)
    return places


def instruction_set() -> str:
    """The vector instructions that kernels may use here. AMX needs the system's permission, which this asks for."""
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{vectors}+AMX" if vectors == "AVX512" and torch.cpu._init_amx() else vectors


# Inductor caches graphs with vector code under keys that do not name the instruction set.
FINGERPRINT = f"{fingerprint(_generating_code())}+{instruction_set()}"
