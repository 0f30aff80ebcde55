"""`flex-inductor bench bias`: learnt relative biases, forward and backward, next to plain causal attention.

T5 has a number for each head and bucket of distances, Swin one for each head and offset in a square of tokens,
Toeplitz one for each head and distance. All have the causal mask, so the products are the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_inductor import create_block_mask, flex_attention, mods
from flex_inductor.masks import library

from .harness import Result, alternate, milliseconds, results_of, rounds

HELP = "learnt relative biases, next to causal attention"
COLUMNS = ("side", "ms", "over causal", "at most")
OPTIONS = rounds(7)
HEADS, HEAD_DIM, MOST = 8, 64, 1.1


class Case(NamedTuple):
    length: int
    dtype: torch.dtype

    @property
    def title(self) -> str:
        return f"{'fp32' if self.dtype is torch.float32 else 'bf16'} S{self.length} forward+backward"


CASES = tuple(
    Case(length, dtype) for dtype in (torch.float32, torch.bfloat16) for length in (1024, 2304, 4096)
)


def toeplitz(length: int) -> tuple[Callable, Tensor]:
    table = torch.randn(HEADS, 2 * length - 1, requires_grad=True)
    return mods.relative_bias(table), table


def t5(length: int) -> tuple[Callable, Tensor]:
    table = torch.randn(32, HEADS, requires_grad=True)
    return mods.t5_bias(table), table


def swin(length: int) -> tuple[Callable, Tensor]:
    side = int(length**0.5)
    table = torch.randn(HEADS, 2 * side - 1, 2 * side - 1, requires_grad=True)
    return mods.relative_bias_2d(table, side), table


def measure(case: Case, arguments: Namespace) -> list[Result]:
    from flex_inductor.backend import flex_inductor

    torch.manual_seed(0)
    torch._dynamo.reset()
    mask = create_block_mask(library.causal(), None, None, case.length, case.length, device="cpu")
    given = [torch.randn(1, HEADS, case.length, HEAD_DIM, dtype=case.dtype) for _ in range(4)]

    def step(attend: Callable, *table: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in given[:3]]
        return torch.autograd.grad(attend(*inputs), [*inputs, *table], given[3])

    sides: dict[str, Callable[[], float]] = {}
    makers = {"T5": t5, "Swin": swin, "Toeplitz": toeplitz}
    made: dict[str, tuple[Any, ...]] = {
        "causal": (None,),
        **{n: make(case.length) for n, make in makers.items()},
    }
    for name, (mod, *table) in made.items():
        attend = torch.compile(
            partial(flex_attention, score_mod=mod, block_mask=mask), backend=flex_inductor, dynamic=False
        )
        sides[name] = partial(milliseconds, partial(step, attend, *table))
        sides[name]()
    facts = lambda side, _: {"at_most": "" if side == "causal" else MOST}  # noqa: E731
    return results_of(case.title, alternate(sides, arguments.rounds), facts)


def headline(results: list[Result]) -> str:
    most = max(results, key=lambda r: r.facts["ratio"].median)
    return f"at most {most.facts['ratio'].median:.2f} times causal attention: {most.side}, {most.case}"
