"""`flex-inductor bench shares`: how much of the machine's own matrix product attention reaches.

Each case is causal. Its forward, its training step (forward and backward) and torch's product of two matrices of the
same dtype take turns, each of 20 ms or one call: the first short call after a product finds no cache as it left it. A
share is operations a second over those of the product: four times the head dims of a visible pair in the forward, ten
more in the backward. Where torch multiplies matrices of 16 bits more slowly than fp32 (no instructions for them), the
fp32 product is the measure.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.masks import library

from . import loops
from .harness import PLOT, Result, Spread, alternate, milliseconds, plot_shares, results_of, rounds

HELP = "attention's share of the machine's own matrix product"
COLUMNS = ("side", "ms", "over the product", "GFLOP/s", "share")
OPTIONS = {**rounds(5), **PLOT}
TURN = 20.0
STEPS = FORWARD, TRAINING = "forward", "forward+backward"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Case:
    length: int
    head_dim: int = 64
    value_dim: int = 0  # 0: as head_dim
    heads: int = 8
    kv_heads: int = 8
    dtype: torch.dtype = torch.float32
    backward: bool = True

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def dims(self) -> str:
        return f"D{self.head_dim}" if self.values == self.head_dim else f"D{self.head_dim} V{self.values}"

    @property
    def title(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}:{self.kv_heads}"
        return f"{DTYPES[self.dtype]} S{self.length} {heads} {self.dims}"

    def flops(self, training: bool) -> float:
        """Of the forward; of both directions in training. Only visible pairs count."""
        pairs = self.heads * self.length * (self.length + 1) / 2
        forward = 2 * (self.head_dim + self.values)
        backward = 2 * (3 * self.head_dim + 2 * self.values)
        return pairs * (forward + backward if training else forward)


_dtypes = (torch.float32, torch.bfloat16)
CASES = (
    *(Case(length, dtype=dtype) for dtype in _dtypes for length in (128, 512, 1024, 4096, 16384)),
    Case(65536, heads=1, kv_heads=1, backward=False),
    *(Case(2048, dim, dtype=dtype) for dtype in _dtypes for dim in (32, 80, 96, 128, 256)),
    *(Case(2048, 192, 128, dtype=dtype) for dtype in _dtypes),
    *(Case(2048, 128, heads=32, kv_heads=8, dtype=dtype) for dtype in _dtypes),
    Case(4096, dtype=torch.float16),
)


def measure(case: Case, arguments: Namespace) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype, size = own_product(case.dtype)
    sides: dict[str, Callable[[], Any]] = {f"{DTYPES[dtype]} product": loops.gemm_step(dtype, size)}
    flops = {f"{DTYPES[dtype]} product": 2.0 * size**3}
    for side, step in steps(case).items():
        sides[side], flops[side] = step, case.flops(side == TRAINING)
    for step in sides.values():
        step()  # compiles
    times = alternate({side: partial(turn, step) for side, step in sides.items()}, arguments.rounds)
    first = next(iter(times))
    rates = {side: [flops[side] / ms / 1e6 for ms in taken] for side, taken in times.items()}

    def facts(side: str, _: list[float]) -> dict[str, Any]:
        share = [rate / own for rate, own in zip(rates[side], rates[first], strict=True)]
        return {"rate": Spread.of(rates[side]), "share": Spread.of(share)}

    return results_of(case.title, times, facts)


def turn(step: Callable[[], Any]) -> float:
    """The median of calls that take TURN milliseconds together, or of one that takes longer."""
    taken = [milliseconds(step)]
    while sum(taken) < TURN:
        taken.append(milliseconds(step))
    return statistics.median(taken)


def own_product(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The dtype and the size of the fastest product of torch that takes this dtype's numbers."""
    of = {each: loops.gemm_size(each) for each in {dtype, torch.float32}}
    rate = {each: size**3 / milliseconds(loops.gemm_step(each, size)) for each, size in of.items()}
    best = max(rate, key=lambda each: rate[each])
    return best, of[best]


def steps(case: Case) -> dict[str, Callable[[], Any]]:
    from flex_inductor.backend import flex_inductor

    mask = create_block_mask(library.causal(), None, None, case.length, case.length, device="cpu")
    attend = torch.compile(
        partial(flex_attention, block_mask=mask, enable_gqa=case.heads != case.kv_heads),
        backend=flex_inductor,
        dynamic=False,
    )
    sizes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.values)
    given = [torch.randn(1, heads, case.length, dim, dtype=case.dtype) for heads, dim in sizes]
    grad = torch.randn(1, case.heads, case.length, case.values, dtype=case.dtype)

    def training() -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in given]
        return torch.autograd.grad(attend(*inputs), inputs, grad)

    forward = torch.no_grad()(lambda: attend(*given))
    return {FORWARD: forward, **({TRAINING: training} if case.backward else {})}


def headline(results: list[Result]) -> str:
    least = min((r for r in results if r.side in STEPS), key=lambda r: r.facts["share"].median)
    return f"worst share: {least.facts['share'].median:.2f}, {least.case} {least.side}"


def plot(axis: Any, results: list[Result], _: Namespace) -> None:
    plot_shares(axis, results, STEPS, "the machine's own matrix product")
