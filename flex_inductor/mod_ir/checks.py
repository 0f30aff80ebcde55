"""Mods as graphs, checked for what they return and for what they may not do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

from . import errors
from .arguments import MASK_LANES, SCORE_LANES
from .capture import LiftedMod
from .names import capture_names
from .replay import Rerun
from .trace import trace_joint, trace_value
from .writes import arguments_of, storage_of, writes

_CHECKED = "flex_inductor_lane_graph"


def lane_graph(mod: Callable, field: str, query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    """`mod` as an FX graph of aten ops, checked: what it returns, and that it only computes."""
    if isinstance(mod, fx.GraphModule) and mod.meta.get(_CHECKED):
        return mod
    if isinstance(mod, LiftedMod):
        return mod.graph("value", lambda: _checked(mod, field, query, captures))
    return _checked(mod, field, query, captures)


def _checked(mod: Callable, field: str, query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    lanes = SCORE_LANES if field == "score_mod" else MASK_LANES
    graph = trace_value(mod, lanes, query, captures)
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    errors.check_mod_result(field, output.meta["val"] if isinstance(output, fx.Node) else output)
    check_ops(graph, field, (*lanes, *capture_names(mod, len(captures))))
    return mark_checked(graph)


def joint_graph(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """`trace_joint`, checked."""
    return derivative_graph(trace_joint, score_mod, query, captures, wanted)


def derivative_graph(
    trace: Callable[..., fx.GraphModule],
    score_mod: Callable,
    query: Tensor,
    captures: Sequence[Any],
    wanted: Sequence[bool],
) -> fx.GraphModule:
    """What `trace` makes of the score_mod, checked."""

    def checked() -> fx.GraphModule:
        graph = trace(score_mod, query, captures, wanted)
        if drawn := random_op(graph):  # also in the backward of a Function
            raise errors.mod_is_random("score_mod", drawn)
        return graph

    if isinstance(score_mod, (LiftedMod, Rerun)):
        return score_mod.graph((trace, *wanted), checked)
    return checked()


def check_ops(graph: fx.GraphModule, field: str, names: Sequence[str]) -> None:
    """Refuse writes to captures, random numbers and the like; `names` are those of the graph's arguments."""
    if written := written_placeholder(graph):
        position, op = written
        raise errors.capture_mutated(field, names[position], op)
    if drawn := random_op(graph):
        raise errors.mod_is_random(field, drawn)
    if beyond := number_beyond(graph):
        raise errors.number_beyond(field, *beyond)


def mark_checked(graph: fx.GraphModule) -> fx.GraphModule:
    """Have `lane_graph` take `graph` as it is: it has been checked."""
    graph.meta[_CHECKED] = True
    return graph


def written_placeholder(module: fx.GraphModule) -> tuple[int, str] | None:
    """The first placeholder that the graph writes to, by position, and the op that does.

    In-place operations on what a lane computes itself are gone from a traced graph.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, written in writes(module.graph):
        storage = storage_of(written)
        if storage in placeholders:
            return placeholders.index(storage), str(node.target)
    return None


def random_op(module: fx.GraphModule) -> str | None:
    """The first op of the graph that draws random numbers."""
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node.target)
    return None


def number_beyond(module: fx.GraphModule) -> tuple[float, torch.dtype] | None:
    """The first number that does not fit the dtype of the tensors beside it: torch gives infinity, another integer or
    an error."""
    for node in module.graph.nodes:
        tensors = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        if beyond := number_beyond_in_call(node.target, node.args, node.kwargs, tensors):
            return beyond
    return None


def number_beyond_in_call(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> tuple[float, torch.dtype] | None:
    """`number_beyond` of one call; `tensors` are those that it takes and gives."""
    dtypes = [t.dtype for t in tensors if isinstance(t, Tensor)]
    dtypes = [dtype for dtype in dtypes if dtype != torch.bool and not dtype.is_complex]
    if not dtypes or target is torch.ops.aten._to_copy.default:
        return None
    if floats := [dtype for dtype in dtypes if dtype.is_floating_point]:
        widest = max(floats, key=lambda dtype: torch.finfo(dtype).max)
        least, most = -torch.finfo(widest).max, torch.finfo(widest).max
        numbers: list[Any] = [
            n for n in tree_iter((args, kwargs)) if isinstance(n, float) and math.isfinite(n)
        ]
    else:
        widest = max(dtypes, key=lambda dtype: torch.iinfo(dtype).max)
        least, most = torch.iinfo(widest).min, torch.iinfo(widest).max
        numbers = _integers_computed_with(target, args, kwargs)
    return next(((number, widest) for number in numbers if not least <= number <= most), None)


def _integers_computed_with(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """The arguments of a call that are no sizes, dimensions or ends of slices."""
    given = arguments_of(target, args, kwargs) if isinstance(target, torch._ops.OpOverload) else ()
    values = [value for a, value in given if str(a.type).removeprefix("Optional") in _VALUES]
    return [value for value in values if isinstance(value, int)]


_VALUES = ("number", "[number]", "Tensor", "[Tensor]")  # types of arguments
