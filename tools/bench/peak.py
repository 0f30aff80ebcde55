"""`flex-inductor bench peak`: what each instruction set can do at best, and what attention reaches of it.

For each of the machine's instruction sets, a loop of nothing but products is the peak. Beside it stand torch's product
of two matrices and our kernels, in a process of its own where torch uses no more than that set. Then come ways to read
memory. These are figures of all threads together.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from . import loops, shares
from .harness import Result, Spread, alternate, milliseconds, rounds
from .workers import Job, Worker

HELP = "the machine's best, by instruction set, and what kernels reach"
COLUMNS = ("side", "ms", "GFLOP/s or GB/s", "share")
OPTIONS = rounds(5)
CALLS = tuple(shares.Case(2048, dim) for dim in (64, 128))


@dataclass(frozen=True)
class Case:
    title: str
    unit: loops.Unit | None  # None: memory


def cases(_: Namespace) -> list[Case]:
    return [*(Case(unit.name, unit) for unit in loops.units()), Case("memory", None)]


def measure(case: Case, arguments: Namespace) -> Iterator[Result]:
    if case.unit is None:
        found = loops.reading(arguments.rounds)
        best = max(found.values())
        for how, rate in found.items():
            yield Result(case.title, how, note="", facts={"rate": rate / 1e9, "share": rate / best})
        return
    with mock.patch.dict(os.environ, case.unit.environment), Worker() as worker:
        for side, milliseconds_, flops, peak in worker.run(Job(reached, (case.unit, arguments.rounds))):
            rates = [flops / ms / 1e6 for ms in milliseconds_]
            facts = {"rate": Spread.of(rates), "share": Spread.of([rate * 1e9 / peak for rate in rates])}
            yield Result(case.title, side, Spread.of(milliseconds_), facts=facts)


def reached(unit: loops.Unit, count: int) -> list[tuple[str, list[float], float, float]]:
    """Each side's milliseconds in each round and its operations, and the unit's operations a second at best."""
    if unit.most != "AVX512_CORE_AMX":
        with without_amx():
            return _reached(unit, count)
    return _reached(unit, count)


def _reached(unit: loops.Unit, count: int) -> list[tuple[str, list[float], float, float]]:
    torch.manual_seed(0)
    size = loops.gemm_size(unit.dtype)
    sides: dict[str, Any] = {"product": (loops.gemm_step(unit.dtype, size), 2 * size**3)}
    for call in (replace(call, dtype=unit.dtype) for call in CALLS):
        for side, step in shares.steps(call).items():
            sides[f"{side} {call.dims}"] = step, call.flops(side == shares.TRAINING)
    for step, _ in sides.values():
        step()
    before = loops.peak(unit)
    times = alternate({side: partial(milliseconds, step) for side, (step, _) in sides.items()}, count)
    peak = max(before, loops.peak(unit))
    in_loop = loops.ROUNDS * unit.flops * torch.get_num_threads()
    measured = [(side, times[side], flops, peak) for side, (_, flops) in sides.items()]
    return [("loop", [in_loop / peak * 1e3], in_loop, peak), *measured]


@contextlib.contextmanager
def without_amx() -> Iterator[None]:
    """Has Inductor compile for AVX-512 where the machine has AMX: no setting does.

    Keys of its cache name the machine's instructions. So what is compiled here gets a cache of its own.
    """
    from torch._inductor.cpu_vec_isa import VecAMX, valid_vec_isa_list
    from torch._inductor.utils import fresh_cache

    found = valid_vec_isa_list()
    all_found = found[:]
    found[:] = [isa for isa in found if not isinstance(isa, VecAMX)]
    try:
        with fresh_cache():
            yield
    finally:
        found[:] = all_found
