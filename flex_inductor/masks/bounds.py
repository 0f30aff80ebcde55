"""A mask on many rectangles at once: always, never, or mixed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mod_ir.arguments import INDEX_DTYPE
from .captured_bounds import Pyramid, readable
from .equal_values import contains, meetings_of
from .interval_rules import bound
from .intervals import INT_DTYPES, Interval
from .tables import Extent, build_tables
from .trace import INDEX_NAMES, MaskProgram, Ref, Step

aten = torch.ops.aten


@dataclass(frozen=True)
class Rectangles:
    """For one batch and head each, `scale` x `scale` tiles at (q, kv) in units of `scale` tiles."""

    scale: int
    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor

    def __len__(self) -> int:
        return self.q.numel()

    def __getitem__(self, which: Tensor | slice) -> Rectangles:
        return Rectangles(self.scale, self.b[which], self.h[which], self.q[which], self.kv[which])


class MaskBounds:
    """Runs a mask program on intervals. Values of one side come from tables, those of both sides by rules."""

    def __init__(self, program: MaskProgram, extent: Extent) -> None:
        self.program = program
        self.extent = extent
        needed = program.needed([program.output])
        self.joint = [i for i in needed if program.steps[i].is_joint]
        used = {i for j in self.joint for i in program.steps[j].refs} | {program.output}
        one_sided = [i for i in sorted(used) if i >= len(INDEX_NAMES) and not program.steps[i].is_joint]
        self.tables = build_tables(program, one_sided, extent)
        self.constants = {i: self._constant(i) for i in one_sided if not program.steps[i].reads}
        self.pyramids: dict[int, Pyramid] = {}

    def _constant(self, i: int) -> Any:
        zero = torch.zeros((), dtype=torch.int64, device=self.program.device)
        return self.program.function(i)(zero, zero, zero, zero)

    @functools.cached_property
    def meetings(self) -> dict[int, Tensor]:
        return meetings_of(self.program, self.extent)

    def over(self, rectangles: Rectangles, look_up: bool = False) -> tuple[Tensor, Tensor]:
        """(true everywhere, true somewhere) as far as can be told, one pair for each rectangle.

        With `look_up`, which is for single tiles, comparisons of equal values are decided by equal_values.py.
        """
        env: dict[int, Interval] = dict(enumerate(self._indices(rectangles)))
        for i, table in self.tables.items():
            tile = rectangles.kv if "kv" in self.program.steps[i].reads else rectangles.q
            env[i] = table.at(rectangles.scale, rectangles.b, rectangles.h, tile)
        for i in self.joint:
            step = self.program.steps[i]
            if step.is_scalar and step.dtype is not None:
                env[i] = self._bound(i, step, step.dtype, env)
                if look_up and i in self.meetings:
                    meets = contains(self.meetings[i], rectangles.q * self.extent.tiles[1] + rectangles.kv)
                    env[i] = Interval.boolean(env[i].lo, env[i].hi & meets)
        answer = env[self.program.output]
        count = len(rectangles)
        return answer.lo.expand(count), answer.hi.expand(count)

    def _indices(self, r: Rectangles) -> list[Interval]:
        made = [
            Interval(x, x, INDEX_DTYPE, 0, size - 1)
            for x, size in ((r.b, self.extent.batch), (r.h, self.extent.heads))
        ]
        for tile, length, block in zip((r.q, r.kv), self.extent.lengths, self.extent.block, strict=True):
            start = tile * (r.scale * block)
            end = (start + (r.scale * block - 1)).clamp(max=length - 1)
            made.append(Interval(start, end, INDEX_DTYPE, 0, length - 1))
        return made

    def _bound(self, i: int, step: Step, dtype: torch.dtype, env: dict[int, Interval]) -> Interval:
        device = self.program.device
        if step.target is aten.index.Tensor:
            read = self._gather(i, step, env)
            return read if read is not None else Interval.unknown(dtype, device)
        if any(j not in env for j in step.refs):
            return Interval.unknown(dtype, device)
        args = [env[a.step] if isinstance(a, Ref) else a for a in step.args]
        kwargs = {k: env[v.step] if isinstance(v, Ref) else v for k, v in step.kwargs.items()}
        return bound(step.target, dtype, device, *args, **kwargs)

    def _gather(self, i: int, step: Step, env: dict[int, Interval]) -> Interval | None:
        source, places = step.args
        values = self.constants.get(source.step) if isinstance(source, Ref) else None
        indices = [env[p.step] for p in places if isinstance(p, Ref) and p.step in env]
        if not isinstance(values, Tensor) or not len(indices) == len(places) == values.dim():
            return None
        if any(index.dtype not in INT_DTYPES for index in indices):
            return None
        ranged = tuple(bool(self.program.steps[p.step].reads & {"q", "kv"}) for p in places)
        if not readable(values, ranged):
            return None
        if i not in self.pyramids:
            self.pyramids[i] = Pyramid(values, ranged)
        return self.pyramids[i].over(indices)
