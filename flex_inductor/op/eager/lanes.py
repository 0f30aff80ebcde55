"""A mod's programs, run on every lane of a tile, and the sums of what lanes give captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ... import compat
from ...mod_ir.arguments import is_number
from ...mod_ir.broadcast import along, broadcasting
from ...mod_ir.program import AXES, LaneProgram, Leaf


def run_lanes(
    program: LaneProgram,
    lanes: dict[str, Tensor],
    live: Tensor | None,
    captures: Sequence[Tensor],
    invariants: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The lane program on every lane of a tile: results have the shape [b, h, q_idx, kv_idx]."""
    guards = [_guard(live, axes, lanes["b"].device) for axes in program.guards]
    varies = [(name,) if name in AXES else AXES for name in program.lanes] + [axes for _, axes in guards]
    given = [lanes[name] for name in program.lanes] + [flags for flags, _ in guards]
    if function := broadcasting(program):
        placed = [along(axes, tensor) for axes, tensor in zip(varies, given, strict=True)]
        numbers = [along((), x) if is_number(x) else x for x in (*captures, *invariants)]
        shape = [lanes[axis].numel() for axis in AXES]
        return tuple(result.expand(shape) for result in function_of(function)(*placed, *numbers))
    fixed = (None,) * (len(captures) + len(invariants))
    function = function_of(program.lane)
    for axis in reversed(AXES):
        in_dims = tuple(0 if axis in axes else None for axes in varies) + fixed
        function = torch.vmap(function, in_dims=in_dims)
    with compat.vmap_allowed():
        return function(*given, *captures, *invariants)


def function_of(graph: fx.GraphModule | Callable) -> Callable:
    """Without a module's hooks: hooks set for all modules may expect those of a model."""
    return graph.forward if isinstance(graph, fx.GraphModule) else graph


def _guard(live: Tensor | None, axes: Sequence[str], device: torch.device) -> tuple[Tensor, tuple[str, ...]]:
    """Whether any lane is live at each position along `axes`, and those of `axes` along which that varies."""
    if live is None:
        return torch.ones((), dtype=torch.bool, device=device), ()
    varies = [axis in axes and live.size(dim) > 1 for dim, axis in enumerate(AXES)]
    for dim in reversed(range(len(AXES))):
        if not varies[dim]:
            live = live.any(dim)
    return live, tuple(axis for axis, kept in zip(AXES, varies, strict=True) if kept)


def unexpanded(lanes: Tensor) -> Tensor:
    """The result without vmap's repetition along axes it does not depend on."""
    for dim in range(len(AXES)):
        if lanes.stride(dim) == 0:
            lanes = lanes.narrow(dim, 0, 1)
    return lanes


class Accumulators:
    """Sums what lanes contribute to captured tensors; the order of additions is fixed on CPU."""

    def __init__(
        self, joint: LaneProgram, captures: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ):
        self.joint, self.captures = joint, captures
        self.invariants = function_of(joint.prologue)(*captures)
        self.sums: dict[int, Tensor] = {}  # by leaf; one without indices once there is something to add
        self.shapes: list[list[int]] = []
        for i, leaf in enumerate(joint.leaves):
            sizes = zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            self.shapes.append([self.invariants[size] if invariant else size for size, invariant in sizes])
            places, row = self.shapes[-1][: leaf.indices], self.shapes[-1][leaf.indices :]
            if leaf.indices:
                self.sums[i] = torch.zeros((math.prod(places), *row), dtype=dtype, device=device)

    def add(
        self,
        indices: dict[str, Tensor],
        raw: Tensor,
        d_score: Tensor,
        live: Tensor | None,
        **more: Tensor,
    ) -> Tensor:
        """Run the joint graph on a tile: returns d(raw score), adds up d(captures)."""
        lanes = {"score": raw, "grad_score": d_score, **more, **indices}
        d_raw, *rest = run_lanes(self.joint, lanes, live, self.captures, self.invariants)
        for i, leaf in enumerate(self.joint.leaves):
            contribution, places, rest = rest[0], rest[1 : 1 + leaf.indices], rest[1 + leaf.indices :]
            if live is not None:
                mask = live.reshape(*live.shape, *(1,) * (contribution.dim() - 4))
                contribution = torch.where(mask, contribution, 0.0)
            if leaf.indices:
                self._scatter(i, leaf, places, contribution, live)
            else:
                total = _sum(contribution, range(4)).squeeze((0, 1, 2, 3))
                self.sums[i] = self.sums[i] + total if i in self.sums else total
        return d_raw.to(raw.dtype)

    def _scatter(
        self, i: int, leaf: Leaf, indices: Sequence[Tensor], value: Tensor, live: Tensor | None
    ) -> None:
        still = [dim for dim, axis in enumerate(AXES) if axis not in leaf.axes]
        value = _sum(value, still)
        flat = torch.zeros((), dtype=torch.int64, device=value.device)
        for index, size in zip(indices, self.shapes[i][: leaf.indices], strict=True):
            for dim in still:
                index = index.narrow(dim, 0, 1)
            index = unexpanded(index).to(torch.int64)
            flat = flat * size + torch.where(index < 0, index + size, index)
        if live is not None:
            flat = torch.where(live.any(still, keepdim=True) if still else live, flat, 0)
        places = flat.expand(value.shape[:4]).reshape(-1)
        if value.is_complex():
            self.sums[i] = self.sums[i].to(self.sums[i].dtype.to_complex())
        self.sums[i].index_add_(0, places, value.flatten(0, 3).to(self.sums[i].dtype))

    def gradients(self) -> tuple[Tensor | None, ...]:
        if len(self.sums) < len(self.shapes):  # no lane is live anywhere
            given = zip(self.joint.gradients, self.captures, strict=True)
            return tuple(torch.zeros_like(capture) if wanted else None for wanted, capture in given)
        leaves = enumerate(zip(self.joint.leaves, self.shapes, strict=True))
        sums = [self.sums[i].view(shape) if leaf.indices else self.sums[i] for i, (leaf, shape) in leaves]
        grads = function_of(self.joint.epilogue)(*sums, *self.captures, *self.invariants)
        return tuple(
            None if grad is None else grad.to(capture.dtype).expand(capture.shape).contiguous()
            for grad, capture in zip(grads, self.captures, strict=True)
        )


def _sum(lanes: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum along `dims`, kept, one at a time: torch splits a sum to a single number by the number of threads."""
    for dim in reversed(dims):
        lanes = lanes.sum(dim, keepdim=True)
    return lanes
