"""A score_mod of one's own, from its values to its machine code.

Shows what the function computes on real scores, holds it to laws that attention keeps, compares the kernel's gradients
with fp64, and prints the loop that the CPU kernel got, and what a card's kernel would take (`--target sm_90`).
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from torch import Tensor

import flex_inductor
from flex_inductor.reference import reference

LENGTH, HEADS, HEAD_DIM = 256, 4, 64
console = Console(highlight=False, soft_wrap=True)


class Retention:
    """Weights that fade with the distance, each head by its own learnt half-life, and never below a floor."""

    def __init__(self) -> None:
        self.half_life = torch.tensor([4.0, 16.0, 64.0, 256.0]).requires_grad_()
        self.floor = torch.full((HEADS,), -6.0).requires_grad_()

    def __call__(self, score, b, h, q_idx, kv_idx):
        faded = (kv_idx - q_idx) / self.half_life[h]
        return score + torch.maximum(faded, self.floor[h])


def largest_errors(score_mod: Retention, mask, inputs: list[Tensor]) -> list[float]:
    """Of the gradients of queries, keys, values, half-lives and floors, relative to fp64."""
    wanted = [*inputs, score_mod.half_life, score_mod.floor]
    run = torch.compile(flex_inductor.flex_attention, backend="flex_inductor", fullgraph=True)
    out = run(*inputs, score_mod, mask)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, grad)
    gold = reference(*(tensor.double() for tensor in inputs), score_mod, mask)[0]
    expected = torch.autograd.grad(gold, wanted, grad.double())
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A mod of one's own and its kernel.")
    parser.add_argument("--target", default="sm_90", help="the card whose kernel is compiled")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3)]
    score_mod = Retention()
    mask = flex_inductor.create_block_mask(flex_inductor.masks.causal(), None, None, LENGTH, LENGTH, "cpu")

    console.rule("What it computes")
    console.print(flex_inductor.trace_mod(score_mod, *inputs[:2]), markup=False)

    console.rule("How near the kernel's gradients are to fp64")
    errors = largest_errors(score_mod, mask, inputs)
    console.print(", ".join(f"{error:.1e}" for error in errors))
    assert max(errors) < 1e-5

    console.rule("What served it")
    console.print(*flex_inductor.decisions(), sep="\n\n", markup=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_inductor.flex_attention(query, key, value, score_mod, mask)

    console.rule("Its part of the CPU's kernel")
    for line in str(flex_inductor.inspect(attend, *inputs, target="cpu")).splitlines():
        if "score_mod:" in line:
            console.print(line, markup=False)

    console.rule(f"What a kernel for {given.target} takes")
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    for line in str(flex_inductor.inspect(attend, *halves, target=given.target)).splitlines():
        if line.lstrip().startswith(("== flex_inductor", "config", "uses", "occupancy")):
            console.print(line, markup=False)


if __name__ == "__main__":
    main()
