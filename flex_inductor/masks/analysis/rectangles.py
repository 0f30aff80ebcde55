"""A mask on many rectangles at once: always, never, or mixed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...mod_ir.arguments import INDEX_DTYPE
from ...mod_ir.recorder import READS
from ..runs import Extent
from .captured_bounds import Pyramid, readable
from .equal_values import contains, meetings_of
from .interval_rules import bound
from .intervals import INT_DTYPES, Interval
from .tables import build_tables
from .trace import MaskGraph, dtype_of, is_joint

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
    """Runs a mask's graph on intervals. Values of one side come from tables, those of both sides by rules."""

    def __init__(self, mask: MaskGraph, extent: Extent) -> None:
        self.mask = mask
        self.extent = extent
        needed = mask.needed([mask.output])
        self.joint = [node for node in needed if is_joint(node)]
        used = {node for joint in self.joint for node in joint.all_input_nodes} | {mask.output}
        one_sided = [n for n in needed if n in used and not is_joint(n) and n.op != "placeholder"]
        self.tables = build_tables(mask, one_sided, extent)
        self.constants = {node: self._constant(node) for node in one_sided if not node.meta[READS]}
        self.pyramids: dict[fx.Node, Pyramid] = {}

    def _constant(self, node: fx.Node) -> Any:
        zero = torch.zeros((), dtype=torch.int64, device=self.mask.device)
        return self.mask.function(node)(zero, zero, zero, zero)

    @functools.cached_property
    def meetings(self) -> dict[fx.Node, Tensor]:
        return meetings_of(self.mask, self.extent)

    def over(self, rectangles: Rectangles, look_up: bool = False) -> tuple[Tensor, Tensor]:
        """(true everywhere, true somewhere), as far as known, one pair for each rectangle.

        With `look_up`, which is for single tiles, comparisons of equal values are decided by equal_values.py.
        """
        known: dict[fx.Node, Interval] = dict(zip(self.mask.indices, self._indices(rectangles), strict=True))
        for node, table in self.tables.items():
            tile = rectangles.kv if "kv" in node.meta[READS] else rectangles.q
            known[node] = table.at(rectangles.scale, rectangles.b, rectangles.h, tile)
        for node in self.joint:
            dtype = dtype_of(node)
            if dtype is None:
                continue
            found = known[node] = self._bound(node, dtype, known)
            if look_up and node in self.meetings:
                meets = contains(self.meetings[node], rectangles.q * self.extent.tiles[1] + rectangles.kv)
                known[node] = Interval.boolean(found.lo, found.hi & meets)
        answer = known[self.mask.output]
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

    def _bound(self, node: fx.Node, dtype: torch.dtype, known: dict[fx.Node, Interval]) -> Interval:
        device = self.mask.device
        found = None
        if node.target is aten.index.Tensor:
            found = self._gather(node, known)
        elif all(source in known for source in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            found = bound(node.target, dtype, device, *args, **kwargs)
        return Interval.unknown(dtype, device) if found is None else found

    def _gather(self, node: fx.Node, known: dict[fx.Node, Interval]) -> Interval | None:
        source, places = node.args
        values = self.constants.get(source)
        indices = [known[place] for place in places if place in known]
        if not isinstance(values, Tensor) or not len(indices) == len(places) == values.dim():
            return None
        if any(index.dtype not in INT_DTYPES for index in indices):
            return None
        ranged = tuple(bool(place.meta[READS] & {"q", "kv"}) for place in places)
        if not readable(values, ranged):
            return None
        if node not in self.pyramids:
            self.pyramids[node] = Pyramid(values, ranged)
        return self.pyramids[node].over(indices)
