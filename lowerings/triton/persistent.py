"""Programs that stay and take tiles of queries from a counter: in which order, and how many heads at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import lowerings, to_dtype

from flex_inductor.op.schedule import Visits

from ..choice import size_hint
from ..mods import realized
from ..problem import AttentionProblem
from .captured import zeros
from .configs import current_device
from .kernel_builder import Builder

EACH = 2  # programs for each multiprocessor; where one fills it the other finds nothing left

CACHED_BYTES = 16 << 20  # that keys and values may take of the second-level cache

aten = torch.ops.aten


def programs(problem: AttentionProblem) -> int:
    return EACH * current_device(problem.device).multiprocessors


def values(builder: Builder, fields: Visits | None) -> dict[str, Any]:
    """What the template is given besides."""
    problem = builder.problem
    builder.tensor("taken", zeros([1], torch.int32, problem), written=True)
    return {
        "B": builder.size(problem.B),
        "H": problem.H,
        "heads_together": _heads_together(problem),
        "order": builder.tensor("order", _heaviest_first(problem, fields)) if fields is not None else None,
    }


def _heads_together(problem: AttentionProblem) -> int:
    """Query heads whose keys and values stay in the cache."""
    one = size_hint(problem.N) * (problem.D + problem.V) * problem.dtype.itemsize
    return int(problem.H // problem.K) * max(CACHED_BYTES // int(one), 1)


def _heaviest_first(problem: AttentionProblem, fields: Visits) -> Any:
    """[B or 1, H or 1, rows]: the schedule's rows, those that visit the most blocks first."""
    visited = _visited(problem, *fields[:2])
    if fields[2] is not None:
        visited = lowerings[aten.add](visited, _visited(problem, *fields[2:]))
    _, order = lowerings[aten.sort.stable](visited, stable=True, dim=-1, descending=True)
    return realized(to_dtype(order, torch.int32))


def _visited(problem: AttentionProblem, counts: Any, blocks: Any) -> Any:
    """How many blocks each row visits."""
    if problem.schedule == "lists":
        return counts
    starts, stops = (lowerings[aten.select](blocks, 1, end) for end in (0, 1))
    so_far = lowerings[aten.cumsum](lowerings[aten.sub](stops, starts), 0)
    before = lowerings[aten.constant_pad_nd](so_far, [1, 0])
    rows = counts.get_size()[2] - 1
    first, last = (
        lowerings[aten.index](before, [lowerings[aten.slice](counts, 2, at, at + rows)]) for at in (0, 1)
    )
    return lowerings[aten.sub](last, first)
