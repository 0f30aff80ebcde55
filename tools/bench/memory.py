"""`flex-inductor bench memory`: the peak of a transformer's training step, next to SDPA's.

Each side has a process of its own. What is measured is the process's resident memory at its peak during a step, above
what it was before: activations, gradients and what kernels hold. Each process gives freed memory back at once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..options import count
from .compile import HEADS, OURS, SDPA, WIDTH, Layer, attention_of
from .harness import Result, above_start, in_a_new_thread, return_freed_memory
from .workers import Job, Worker

HELP = "memory of a training step, next to SDPA's"
COLUMNS = ("side", "ms", "MB at the peak", "over SDPA")
OPTIONS = {"--length": count(4096, "tokens"), "--layers": count(12, "layers of the transformer")}


class Case(NamedTuple):
    layers: int
    length: int

    @property
    def title(self) -> str:
        return f"{self.layers} layers, {self.length} tokens, width {WIDTH}, {HEADS} heads, fp32"


def cases(arguments: Namespace) -> list[Case]:
    return [Case(arguments.layers, arguments.length)]


def measure(case: Case, _: Namespace) -> Iterator[Result]:
    peaks = {}
    for side in (SDPA, OURS):
        with Worker() as worker:
            peaks[side] = worker.run(Job(peak_of_step, (side, *case)))
        facts = {"MB": peaks[side], "ratio": peaks[side] / peaks[SDPA]}
        yield Result(case.title, side, note="", facts=facts)


def peak_of_step(side: str, layers: int, length: int) -> float:
    return_freed_memory()
    attend = attention_of(side, length)
    model = nn.Sequential(*(Layer(attend) for _ in range(layers)))
    compiled = torch.compile(model, backend="flex_inductor" if side == OURS else "inductor")
    x = torch.randn(1, length, WIDTH)

    def step() -> None:
        compiled(x).sum().backward()

    step()  # compiles
    return above_start(partial(in_a_new_thread, step))


def headline(results: list[Result]) -> str:
    return f"{results[-1].facts['ratio']:.2f} of SDPA's peak"
