"""Which of the assemblers at hand makes binaries for sm_90: the newest.

ptxas 12.8 and 12.9 may reuse registers that a product still reads (triton#11781). On an H200 keys of 8 bits gave noise
with 12.8, and the right numbers with 13.0. Until 3.8 Triton takes one of these for Hopper, unless torch brings its own.
A newer one, for Blackwell, lies beside them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAME = "TRITON_PTXAS_PATH"  # set by users, or by Inductor to what torch brings


@functools.cache
def use_newest() -> None:
    """Have Triton use it from now on."""
    from triton.backends.nvidia import compiler

    compiler.get_ptxas = preferring_newest(compiler.get_ptxas)
    compiler.get_ptxas_version.cache_clear()


def preferring_newest(usual: Callable[[int], Any]) -> Callable[[int], Any]:
    """From an architecture's number to its assembler. What a user asks for by the environment variable stays."""
    from triton import knobs

    torch_s = str(Path(torch.__file__).parent / "bin" / "ptxas")

    def get_ptxas(arch: int) -> Any:
        if arch != 90 or os.environ.get(NAME) not in (None, torch_s):
            return usual(arch)
        tools = usual(arch), knobs.nvidia.ptxas_blackwell, knobs.NvidiaTool.from_path(torch_s)
        return max(filter(None, tools), key=version)

    return get_ptxas


def version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
