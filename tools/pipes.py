"""How fast a main loop could be, by its instructions: a model of cards, not a measurement.

An instruction takes its turn in a pipe of the multiprocessor, and one of the four schedulers' slots. How many turns a
pipe has in a cycle is what NVIDIA publishes: "Arithmetic Instructions" in the CUDA C++ Programming Guide, and the peak
of the tensor cores. Nothing is fitted. What the model leaves out: latencies, traffic to and from memory, the operands
that tensor cores read from shared memory, and that not every branch in a loop is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .sass import TENSOR_CORE, Instruction, multiply_adds

PIPES = ("tensor", "fp32", "integer", "special", "shared", "issue")
WARP = 32


class Card(NamedTuple):
    name: str
    multiprocessors: int
    clock: float  # at which the tensor cores have their published peak
    multiply_adds: int  # of 16-bit numbers by tensor cores, in a cycle of a multiprocessor
    lanes: Mapping[str, int]  # that the other pipes take in a cycle


_LANES = {"integer": 64, "special": 16, "shared": 32, "issue": 4 * WARP}
CARDS = {
    "sm_80": Card("A100", 108, 1.41e9, 1024, {**_LANES, "fp32": 64}),
    "sm_90": Card("H100", 132, 1.83e9, 2048, {**_LANES, "fp32": 128}),
}

_ISSUED_ONLY = (
    r"U[A-Z]|BRA|BSSY|BSYNC|BAR|DEPBAR|LDGDEPBAR|WARP|NOP|LDG|STG|RED|ATOM|UTMA|UBLKCP|SYNCS|EXIT|FENCE"
)
_PIPES = {  # the first pattern that matches names the pipe; integer for all others
    "special": r"MUFU|I2F|F2I",
    "fp32": r"FADD|FMUL|FFMA|HADD2|HMUL2|HFMA2",
    "shared": r"LDS|STS|LDSM|STSM|SHFL|ATOMS",
}
_WIDE = {"64": 2, "128": 4}  # times the bits that a lane of shared memory gives in a turn


class Overlap(NamedTuple):
    """What goes on in a loop while it waits."""

    copies: tuple[int, ...]  # into shared memory that may be under way, at each wait for one
    products: (
        int  # of tensor cores that may be under way at every wait for one; 0 if each is waited for at once
    )
    barriers: int


def cycles(loop: Sequence[Instruction], warps: int, target: str) -> dict[str, float]:
    """Of each pipe of a multiprocessor, for one iteration of one instance."""
    card = CARDS[target]
    found = dict.fromkeys(PIPES, 0.0)
    for instruction in loop:
        found["issue"] += WARP / card.lanes["issue"]
        if instruction.matches(TENSOR_CORE):
            half_rate = 2 if "TF32" in instruction.operation else 1
            found["tensor"] += half_rate * multiply_adds(instruction) / card.multiply_adds
        elif not instruction.matches(_ISSUED_ONLY):
            pipe = next((name for name, pattern in _PIPES.items() if instruction.matches(pattern)), "integer")
            found[pipe] += _turns(instruction) * WARP / card.lanes[pipe]
    return {pipe: found[pipe] * warps for pipe in PIPES}


def _turns(instruction: Instruction) -> int:
    parts = instruction.operation.split(".")
    if parts[0] in ("LDSM", "STSM"):  # so many matrices of 128 bytes
        return int(parts[-1]) if parts[-1].isdigit() else 1
    return next((_WIDE[part] for part in parts if part in _WIDE), 1) if parts[0] in ("LDS", "STS") else 1


def busiest(by_pipe: Mapping[str, float]) -> str:
    """The three pipes that are busy for longest, with their cycles."""
    longest = sorted(by_pipe, key=lambda name: -by_pipe[name])[:3]
    return ", ".join(f"{name} {by_pipe[name]:.0f}" for name in longest)


def overlap(loop: Sequence[Instruction]) -> Overlap:
    waits = [i for i in loop if i.operation.startswith("DEPBAR.LE")]
    products = [_count(i) for i in loop if i.operation.startswith("WARPGROUP.DEPBAR")]
    return Overlap(
        tuple(_count(wait) for wait in waits),
        min(products, default=0),
        sum(i.operation.startswith("BAR.SYNC") for i in loop),
    )


def _count(wait: Instruction) -> int:
    found = re.search(r",\s*(0x[0-9a-f]+)", wait.operands)
    return int(found[1], 16) if found else 0


class Bound(NamedTuple):
    """In operations a second, of a whole card."""

    pipe: str  # that is busy for longest
    at_most: float  # all pipes at once
    in_step: float  # the other pipes only while the tensor cores rest


def bound(by_pipe: Mapping[str, float], operations: float, target: str) -> Bound:
    """For a loop that takes these cycles for so many operations that have to be done."""
    card = CARDS[target]
    pipe = max(by_pipe, key=lambda name: by_pipe[name])
    rest = max(count for name, count in by_pipe.items() if name != "tensor")
    per_second = operations * card.clock * card.multiprocessors
    return Bound(pipe, per_second / by_pipe[pipe], per_second / (by_pipe["tensor"] + rest))
