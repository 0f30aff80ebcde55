"""Graphs of further derivatives of a score_mod, for forward mode and for derivatives of gradients.

`f` is the score_mod and J(x, g) its gradient at x = (score, *captures) times g, which the joint graph computes. As
there, the function itself is differentiated, not its graph: what it detaches stays so, and custom autograd.Functions
keep their backward. A derivative along a direction is the gradient of a gradient, so a Function needs no jvp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import errors
from .arguments import SECOND_LANES, TANGENT_LANES
from .indexing import LaneIndexing
from .trace import trace_function
from .tracer import Tracer


def trace_tangent(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """(score, b, h, q_idx, kv_idx, score_along, *captures, *along) -> the derivative of f along the direction.

    A direction has the score's and that of each capture that is `wanted`.
    """

    def tangent(at: _At) -> Tensor:
        return _along(lambda grad: at.gradient(grad), at.value, at.along)

    return _trace(tangent, TANGENT_LANES, score_mod, query, captures, wanted)


def trace_backward_vjp(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """(score, b, h, q_idx, kv_idx, grad_score, score_along, grad_score_along, *captures, *along) -> the gradient of
    <along, J(x, grad_score)> + grad_score_along f(x) for the score and each capture."""

    def vjp(at: _At) -> tuple[Tensor | None, ...]:
        return at.with_nones(_gradient((*at.gradient(at.grad), at.value), at.x, (*at.along, at.grad_along)))

    return _trace(vjp, SECOND_LANES, score_mod, query, captures, wanted)


def trace_backward_jvp(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """The same arguments -> the derivative of J(x, grad_score) along (score_along, *along, grad_score_along).

    Where f is what its gradient says, this is the function above, by symmetry. The backward of a Function may say
    something else.
    """

    def jvp(at: _At) -> tuple[Tensor | None, ...]:
        first = at.gradient(at.grad)
        bent = [_along(lambda weight, of=of: _gradient((of,), at.x, (weight,)), of, at.along) for of in first]
        straight = at.gradient(at.grad_along)
        return at.with_nones([one + other for one, other in zip(bent, straight, strict=True)])

    return _trace(jvp, SECOND_LANES, score_mod, query, captures, wanted)


class _At:
    """The score_mod at one lane."""

    def __init__(
        self, run: Callable, lanes: dict[str, Tensor], tensors: Sequence[Any], wanted: Sequence[bool]
    ):
        captures, along = tensors[: len(wanted)], tensors[len(wanted) :]
        score = lanes["score"].detach().requires_grad_()
        captures = [
            capture.detach().requires_grad_() if want else capture
            for capture, want in zip(captures, wanted, strict=True)
        ]
        self.wanted, self.given = wanted, len(along)
        self.x = (score, *(c for c, want in zip(captures, wanted, strict=True) if want))
        self.along = (lanes["score_along"], *along)
        self.value = run(score.clone(), *(lanes[axis] for axis in ("b", "h", "q_idx", "kv_idx")), *captures)
        grad = lanes.get("grad_score")
        self.grad = None if grad is None else grad.detach().requires_grad_()  # as marks of Functions need it
        self.grad_along = lanes.get("grad_score_along")

    def gradient(self, grad: Any) -> Sequence[Tensor]:
        """J(x, grad)."""
        gradients = _gradient((self.value,), self.x, (grad,))
        if any(map(_is_marked, gradients)):
            raise errors.differentiable_once()
        return gradients

    def with_nones(self, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """In the form of a joint graph's results."""
        d_score, *found = gradients
        rest = iter(found)
        return d_score, *(next(rest) if want else None for want in self.wanted), *(None,) * self.given


def _gradient(of: Sequence[Tensor], x: Sequence[Tensor], grads: Sequence[Any]) -> Sequence[Tensor]:
    pairs = [
        (value, grad.to(value.dtype)) for value, grad in zip(of, grads, strict=True) if value.requires_grad
    ]
    if not pairs:
        return tuple(map(torch.zeros_like, x))
    values, given = zip(*pairs, strict=True)
    return torch.autograd.grad(values, x, given, create_graph=True, materialize_grads=True)


def _is_marked(gradient: Tensor) -> bool:
    """Whether the backward of a Function marked once_differentiable made it.

    Autograd raises only on a path through the marked node, and no path from there leads to `x`.
    """
    seen, waiting = set(), [gradient.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().endswith("::Error"):
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


def _along(pullback: Callable, value: Tensor, direction: Sequence[Tensor]) -> Tensor:
    """The derivative along a direction: a pullback is linear in its argument, and this is its transpose."""
    weight = torch.zeros_like(value).requires_grad_()
    (tangent,) = _gradient(pullback(weight), (weight,), direction)
    return tangent


def _trace(
    derivative: Callable,
    lanes: Sequence[str],
    score_mod: Callable,
    query: Tensor,
    captures: Sequence[Any],
    wanted: Sequence[bool],
) -> fx.GraphModule:
    tracer = Tracer()
    run = tracer.keeping_lines(score_mod)

    def traced(*args):
        with torch.enable_grad(), LaneIndexing():
            at = _At(run, dict(zip(lanes, args, strict=False)), args[len(lanes) :], wanted)
            return derivative(at)

    along = [capture for capture, want in zip(captures, wanted, strict=True) if want]
    return trace_function(tracer, traced, lanes, query, [*captures, *along])
