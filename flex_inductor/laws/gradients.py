"""Gradients against differences of the function itself, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import errors
from .calls import Call
from .report import NotApplicable, Note

STEPS = (1e-7, 1e-5, 1e-3)  # small ones step over few kinks, large ones over the roundings of what is in fp32
RIGHT = 1e-4  # of a derivative's size
LEAST = 1e-4  # of the function's value: smaller derivatives are judged as if they had this size
UNKNOWN = 1e-2  # differences that scatter more say nothing
ELEMENTS = 4  # looked at one by one where a derivative is wrong

Loss = Callable[[Sequence[Tensor]], Tensor]


class Difference(NamedTuple):
    """A derivative as (f(x + h d) - f(x - h d)) / 2h has it."""

    value: float
    off: float  # how far it may be off: by how much a step of twice the size changes it

    def is_sure(self, size: float) -> bool:
        return 10 * self.off <= max(UNKNOWN * max(size, abs(self.value)), 1e-9)

    def agrees_with(self, claimed: float, size: float) -> bool:
        return abs(claimed - self.value) <= RIGHT * max(size, abs(self.value)) + 10 * self.off


def of_call(call: Call) -> Iterator[str]:
    """Each tensor's gradient, along a random direction."""
    if reason := call.not_plain:
        raise NotApplicable(reason)
    named, function = call.in_float64()
    generator = torch.Generator().manual_seed(1)
    upstream: list[Tensor] = []

    def loss(tensors: Sequence[Tensor]) -> Tensor:
        results = function(*tensors)
        if not upstream:
            upstream.extend(torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results)
        out, lse = results
        # A row that sees nothing has a logsumexp of -inf, and a gradient of 0.
        lse = torch.where(lse.isfinite(), lse, 0.0)
        return (out * upstream[0]).sum() + (lse * upstream[1]).sum()

    checked = along_directions(loss, named, generator)
    if all(gradient.is_right and gradient.is_unknown for gradient in checked):
        raise NotApplicable("; ".join(map(errors.scattered, checked)))
    for i, gradient in enumerate(checked):
        if not gradient.is_right:
            yield errors.gradient(gradient, _worst(loss, [t for _, t in named], i, gradient.whole))
        elif gradient.is_unknown:
            yield Note(errors.scattered(gradient))


class Gradient(NamedTuple):
    """Of one tensor, along a random direction."""

    name: str
    whole: Tensor
    claimed: float  # by the backward
    size: float  # of a derivative along a random direction
    found: Difference

    @property
    def is_right(self) -> bool:
        return math.isfinite(self.claimed) and self.found.agrees_with(self.claimed, self.size)

    @property
    def is_unknown(self) -> bool:
        return not self.found.is_sure(self.size)


def along_directions(
    loss: Loss, named: Sequence[tuple[str, Tensor]], generator: torch.Generator
) -> list[Gradient]:
    """The gradient of each tensor, and what it should be."""
    names, tensors = zip(*named, strict=True)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        value = loss(leaves)
        if not value.isfinite():
            raise NotApplicable(errors.NOT_FINITE)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
    checked = []
    for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        grad = torch.zeros_like(tensor) if grads[i] is None else grads[i]
        along = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * _size(tensor)
        parts = grad * along
        claimed = float(parts.sum())
        size = max(float(parts.square().sum().sqrt()), LEAST * abs(float(value.detach())))
        found = _difference(loss, tensors, i, along, claimed, size)
        checked.append(Gradient(name, grad, claimed, size, found))
    return checked


def _size(tensor: Tensor) -> float:
    size = float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
    return size if size > 0 and math.isfinite(size) else 1.0


@torch.no_grad()
def _difference(
    loss: Loss, tensors: Sequence[Tensor], i: int, along: Tensor, claimed: float | None, size: float
) -> Difference:
    """By the first step whose result is sure and agrees with what is claimed, if anything; else by the surest."""

    def by(step: float) -> float:
        ends = [loss([*tensors[:i], tensors[i] + sign * step * along, *tensors[i + 1 :]]) for sign in (1, -1)]
        return float(ends[0] - ends[1]) / (2 * step)

    tried = []
    for step in STEPS:
        fine, coarse = by(step), by(2 * step)
        found = Difference(fine, abs(fine - coarse) if math.isfinite(fine - coarse) else math.inf)
        if found.is_sure(size) and (claimed is None or found.agrees_with(claimed, size)):
            return found
        tried.append(found)
    return min(tried, key=lambda found: found.off)


def _worst(
    loss: Loss, tensors: Sequence[Tensor], i: int, grad: Tensor
) -> tuple[tuple[int, ...], float, float]:
    """Of some elements, large gradients and any others: the one that is furthest off, what came, what was expected."""
    flat, size = grad.flatten(), _size(tensors[i])
    several = min(ELEMENTS // 2, len(flat))
    largest = flat.abs().nan_to_num(torch.inf).topk(several).indices
    found = []
    for element in {*largest.tolist(), *torch.linspace(0, len(flat) - 1, several).long().tolist()}:
        along = torch.zeros_like(flat)
        along[element] = size
        got = float(flat[element])
        want = _difference(loss, tensors, i, along.view_as(grad), None, abs(got * size)).value / size
        at = tuple(int(j) for j in torch.unravel_index(torch.tensor(element), grad.shape))
        found.append((at, got, want))
    return max(found, key=lambda one: abs(one[1] - one[2]) if math.isfinite(one[1]) else math.inf)
