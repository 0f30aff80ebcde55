"""Tile sizes of the CPU kernels, best first, and the estimates by which a machine's caches prune them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..choice import size_hint
from ..problem import AttentionProblem


class Caches(NamedTuple):
    """Bytes of one core's first and second level."""

    first: int
    second: int

    @classmethod
    def of_this_machine(cls) -> Caches:
        found = {1: 32 << 10, 2: 512 << 10}  # the usual sizes, if the system gives none
        for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
            with contextlib.suppress(OSError):  # virtual machines may hide some of it
                level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
                if kind != "Instruction" and size.endswith("K"):
                    found[int(level)] = int(size[:-1]) << 10
        return cls(found[1], found[2])


class ForwardConfig(NamedTuple):
    block_m: int  # queries of a work item
    block_n: int  # keys of a tile
    rows: int  # queries whose scores are held at a time, about: whole register blocks


class DecodeConfig(NamedTuple):
    block_n: int  # keys whose scores are held at a time
    split: int  # keys of a work item, about


class BackwardConfig(NamedTuple):
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile


TABLES: dict[str, list[Any]] = {
    "forward": [
        ForwardConfig(128, 256, 16),
        ForwardConfig(128, 128, 32),
        ForwardConfig(64, 128, 32),
        ForwardConfig(256, 128, 32),
        ForwardConfig(128, 64, 64),
        ForwardConfig(128, 256, 32),
        ForwardConfig(64, 64, 32),
        ForwardConfig(32, 32, 32),
    ],
    "decode": [
        DecodeConfig(64, 2048),
        DecodeConfig(128, 2048),
        DecodeConfig(64, 4096),
        DecodeConfig(64, 1024),
        DecodeConfig(32, 1024),
    ],
    "backward": [
        BackwardConfig(64, 128),
        BackwardConfig(128, 128),
        BackwardConfig(128, 64),
        BackwardConfig(256, 128),
        BackwardConfig(64, 64),
        BackwardConfig(32, 128),
        BackwardConfig(32, 32),
    ],
}

_PANEL = 32  # the widest
# Each tile of queries brings the keys that it visits, and their gradients, into the second cache anew. Large ones do so
# less often, and were faster with 2 MB there, but not with 1 MB.
_LARGE, _LARGE_CACHE = BackwardConfig(256, 128), 2 << 20


def candidates(
    kernel: str, problem: AttentionProblem, caches: Caches
) -> tuple[list[Any], list[tuple[Any, str]]]:
    """The configs that fit the caches, best first, and why the others do not. The last always counts as fitting."""
    fitting, rejected = [], []
    table = TABLES[kernel]
    if caches.second >= _LARGE_CACHE:
        table = sorted(table, key=lambda config: config != _LARGE)
    for config in table:
        reason = too_large(kernel, config, problem, caches)
        if reason is None or config is table[-1]:
            fitting.append(config)
        else:
            rejected.append((config, reason))
    return fitting, rejected


def too_large(kernel: str, config: Any, problem: AttentionProblem, caches: Caches) -> str | None:
    """Why a config would be slow: what it uses again and again should stay in a cache."""
    first, second = _working_set(kernel, config, problem)
    for level, used, size in (("first", first, caches.first * 3 // 4), ("second", second, caches.second)):
        if used > size:
            return f"{used >> 10} KB in a {level}-level cache with room for {size >> 10}"
    return None


def estimate(kernel: str, config: Any, problem: AttentionProblem) -> str:
    first, second = _working_set(kernel, config, problem)
    return f"{first >> 10} KB in its innermost loop, {second >> 10} KB in a tile"


def _working_set(kernel: str, config: Any, problem: AttentionProblem) -> tuple[int, int]:
    """Bytes of the innermost loops, and of the tile around them."""
    width = size_hint(problem.D) + size_hint(problem.V)
    element = 2 if problem.dtype == torch.bfloat16 else 4  # as products read them
    if kernel == "decode":
        return 0, config.block_n * width * problem.dtype.itemsize
    scores = 4 * (config.block_n + _PANEL)
    if kernel == "forward":
        return config.rows * scores, width * (config.block_n * element + config.block_m * 4)
    return 0, 3 * config.block_m * scores + width * 4 * (config.block_m + config.block_n)


def misfit(kernel: str, config: Any) -> str | None:
    """Why the kernel cannot be made with a config."""
    for name, size in config._asdict().items():
        least = {"split": 1, "rows": 16}.get(name, 32)
        if size < least or size % least:
            return f"{name} is {size}, and must be a multiple of {least} from {least}"
        if size > 1 << 20:
            return f"{name} is {size}, and may be {1 << 20} at most"
    return None
