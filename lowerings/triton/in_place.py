"""Additions to memory by assembly. Each thread adds all that it holds, so no two may hold the same element.

How a tile lies in threads is known once Triton has compiled the kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ADDITION = "red.relaxed.gpu.global.add.f32"  # in tiles.jinja


def adds_twice(constants: Mapping[str, Any], compiled: Any) -> bool:
    """Whether a kernel with such constants adds in place, and may add one score's value more than once."""
    return constants.get("COALESCED") == 0 and not adds_once(_intermediate(compiled))


def adds_once(ttgir: str) -> bool:
    """Whether every addition in place is sure to be done once. Where warps are specialized nothing is."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    sure = '"ttg.num-ctas" = 1 : i32' in ttgir and "ttg.warp_specialize" not in ttgir
    for line in ttgir.splitlines() if sure else ():
        if ADDITION in line:
            tile = re.search(r"-> tensor<(\d+)x(\d+)xi32, (#\w+)>", line)
            sure &= tile is not None and _held_once(layouts.get(tile[3], ""), (int(tile[1]), int(tile[2])))
    return sure


def _held_once(layout: str, tile: tuple[int, int]) -> bool:
    """Whether each element of a tile belongs to one thread. Layouts cover every element, so it does if they have no
    room for more."""
    kind = layout.removeprefix("#ttg.").partition("<")[0]
    if kind == "linear":  # a pair for every bit of the place in a thread, a warp, among warps
        pairs = re.findall(r"\[\d+, \d+\]", layout)
        return 2 ** len(pairs) == math.prod(tile)
    if kind not in _FACTORS:
        return False
    sizes = {
        name: [*map(int, found.split(","))] for name, found in re.findall(r"(\w+) = \[([\d, ]+)\]", layout)
    }
    unit = (math.prod(sizes[name][side] for name in _FACTORS[kind]) for side in (0, 1))
    return all(room <= length for room, length in zip(unit, tile, strict=True))


# For the unit that a layout repeats to fill a tile. In a smaller tile, threads share elements.
_FACTORS = {
    "nvidia_mma": ("instrShape", "warpsPerCTA"),
    "blocked": ("sizePerThread", "threadsPerWarp", "warpsPerCTA"),
}


def _intermediate(compiled: Any) -> str:
    """Triton's text in its dialect for GPUs; nothing where it was not kept."""
    if hasattr(compiled, "asm"):
        return compiled.asm.get("ttgir", "")
    path = Path(compiled.cubin_path).with_suffix(".ttgir")  # where Inductor launches by itself
    return path.read_text() if path.exists() else ""
