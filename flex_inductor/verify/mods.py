"""A call's mods as the exact results need them, with how far results in their own dtypes are off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..mod_ir.program import LaneProgram
from ..mod_ir.serialise import GraphFunction
from .lanes import on_lanes

NEIGHBOURS = 16  # keys: the worst of these lanes tells how well a mod computes in fp32


class Mod:
    """A mod in two ways: everything in float64, and in the dtypes it is written in."""

    def __init__(self, text: str, captures: Sequence[Tensor]):
        self.plain = LaneProgram.from_text(text)
        self.wide = _widened(self.plain)
        self.wide_captures = tuple(c.double() if c.is_floating_point() else c for c in captures)
        self.plain_captures = tuple(captures)
        self.wide_invariants = self.wide.prologue(*self.wide_captures)
        self.plain_invariants = self.plain.prologue(*self.plain_captures)

    def exact(self, lanes: dict[str, Tensor], live: Tensor | None) -> tuple[Tensor, ...]:
        return on_lanes(self.wide, lanes, live, self.wide_captures, self.wide_invariants)

    def rounded(
        self, lanes: dict[str, Tensor], live: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        lanes = {name: t.to(dtype) if t.is_floating_point() else t for name, t in lanes.items()}
        return on_lanes(self.plain, lanes, live, self.plain_captures, self.plain_invariants)

    def error(
        self, lanes: dict[str, Tensor], live: Tensor, dtype: torch.dtype, exact: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each value: in `dtype`, and how far it is off there or in the lanes beside it."""
        for value, plain in zip(exact, self.rounded(lanes, live, dtype), strict=True):
            if not value.is_floating_point():
                yield plain, plain
                continue
            plain = plain.double()
            shape = (..., *(None,) * (value.dim() - 4))  # rows beside the lanes
            yield plain, 2 * worst_near(apart(plain, value).where(live[shape], 0.0))


def _widened(program: LaneProgram) -> LaneProgram:
    parts: Any = {part: _widened_graph(getattr(program, part)) for part in ("prologue", "lane", "epilogue")}
    return program._replace(**parts)


def _widened_graph(graph: Any) -> GraphFunction:
    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    steps = [
        step._replace(args=tree_map(wide, step.args), kwargs=tree_map(wide, step.kwargs))
        for step in graph.steps
    ]
    constants = [c.double() if c.is_floating_point() else c for c in graph.constants]
    return GraphFunction(graph.inputs, constants, steps, graph.output)


def apart(left: Tensor, right: Tensor) -> Tensor:
    """The distance; 0 for NaN, and between infinities of one sign."""
    return (left - right).abs().nan_to_num(0.0, math.inf, math.inf)


def worst_near(lanes: Tensor) -> Tensor:
    if lanes.dim() != 4:
        return lanes
    keys = lanes.size(-1)
    padded = torch.nn.functional.pad(lanes, (0, -keys % NEIGHBOURS)).unflatten(-1, (-1, NEIGHBOURS))
    return padded.amax(-1, keepdim=True).expand(padded.shape).flatten(-2)[..., :keys]
