"""Persistent instances, which take tiles of queries from a counter: in which order, and how many heads at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.lowering import broadcast_symbolic_shapes, lowerings
from torch._inductor.virtualized import V

from flex_inductor.visits import BlockRuns
from flex_inductor.visits.text import Walk

from ..buffers import realized
from ..choice import size_hint
from ..problem import AttentionProblem
from .captured import zeros
from .configs import Config, current_device, launched_with
from .kernel import Before, empty
from .kernel_builder import Builder

EACH = 2  # instances for each multiprocessor; if only one fits, the other starts when nothing is left

CACHED_BYTES = 16 << 20  # that keys and values may take of the second-level cache

aten, prims = torch.ops.aten, torch.ops.prims


def instances(problem: AttentionProblem) -> int:
    return EACH * current_device(problem.device).multiprocessors


def values(
    builder: Builder, call: Any, walks: Sequence[Walk], configs: Sequence[Config]
) -> tuple[dict[str, Any], Before | None]:
    """What the template is given besides, and what is called before the kernel; `walks` are the call's.

    Rows of a table are sorted by what they visit. Without one the last rows come first, as they do without a counter.
    Of several configs the fastest is only known at the call, and may have no persistent instances: there `Before` sorts
    the rows. C++ wrappers cannot make that call, so rows are sorted in the graph.
    """
    problem, form, order, before = builder.problem, builder.problem.schedule, None, None
    schedule, fields = call.inputs.schedule, None
    if isinstance(schedule, BlockRuns):
        fields = [field for table in schedule.side("keys") if table is not None for field in table]
    if len(configs) == 1 or V.graph.cpp_wrapper:
        taken = zeros([1], torch.int32, problem)
        if fields is not None:
            order = realized(_heaviest_first(form, fields, _lowered))
    else:
        taken = empty([1], None, torch.int32, problem.device)
        names = ["taken"]
        if fields is not None:
            order = empty(_rows(form, fields), None, torch.int32, problem.device)
            tables = [tensor for walk in walks for tensor in (walk.offsets, walk.runs)]
            names += ["order", *(tensor.name for tensor in tables)]
        before = Before(fill_if_used, form, names)
    builder.tensor("taken", taken, written=True)
    found = {
        "B": builder.size(problem.B),
        "H": problem.H,
        "heads_together": _heads_together(problem),
        "order": None if order is None else builder.tensor("order", order, written=before is not None),
    }
    return found, before


def _heads_together(problem: AttentionProblem) -> int:
    """Query heads whose keys and values stay in the cache."""
    one = size_hint(problem.N) * (problem.D + problem.V) * problem.dtype.itemsize
    return int(problem.H // problem.K) * max(CACHED_BYTES // int(one), 1)


def fill_if_used(
    kernel: Any,
    form: str | None,
    taken: torch.Tensor,
    order: torch.Tensor | None = None,
    *fields: torch.Tensor,
) -> None:
    """Set the counter and the order, if the kernel has persistent instances or is about to be timed with them."""
    if len(kernel.launchers) == 1 and not launched_with(kernel.launchers[0].config).persistent:
        return
    taken.zero_()
    if order is not None:
        order.copy_(_heaviest_first(form, fields, _called))


def _lowered(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return lowerings[operation](*args, **kwargs)


def _called(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return operation(*args, **kwargs)


def _rows(form: str | None, fields: Sequence[Any]) -> list[Any]:
    """The size of the order."""
    counted = [field.get_size() for field in fields[::2] if field is not None]
    *outer, rows = functools.reduce(broadcast_symbolic_shapes, counted)
    return [*outer, rows if form == "lists" else rows - 1]


def _heaviest_first(form: str | None, fields: Sequence[Any], call: Callable) -> Any:
    """[B or 1, H or 1, rows]: the schedule's rows, those that visit the most blocks first. `call` runs an operator."""
    counted = [
        _visited(form, *pair, call)
        for pair in zip(fields[::2], fields[1::2], strict=True)
        if pair[0] is not None
    ]
    visited = counted[0] if len(counted) == 1 else call(aten.add, *counted)
    _, order = call(aten.sort.stable, visited, stable=True, dim=-1, descending=True)
    return call(prims.convert_element_type, order, torch.int32)


def _visited(form: str | None, counts: Any, blocks: Any, call: Callable) -> Any:
    """How many blocks each row visits."""
    if form == "lists":
        return counts
    starts, stops = (call(aten.select, blocks, 1, end) for end in (0, 1))
    so_far = call(aten.cumsum, call(aten.sub, stops, starts), 0)
    before = call(aten.constant_pad_nd, so_far, [1, 0])
    first, last = (call(aten.slice, counts, 2, *ends) for ends in ((0, -1), (1,)))
    return call(aten.sub, *(call(aten.index, before, [at]) for at in (last, first)))
