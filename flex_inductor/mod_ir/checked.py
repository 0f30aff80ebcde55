"""Mods as checked graphs, and what their author calls what they capture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from .. import errors
from .trace import MASK_LANES, SCORE_LANES, number_beyond, random_op, trace_mod, written_placeholder


class WrappedMod:
    """A mod changed by a rule, its captures already among the op's inputs."""

    def __init__(self, fn: Callable, names: Sequence[str]):
        self.fn, self.names = fn, tuple(names)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


CAPTURE_NAME = "flex_inductor_capture"  # the key of a placeholder's meta under which Dynamo's rule puts it


def capture_names(mod: Any, count: int) -> tuple[str, ...]:
    """What a person calls the last `count` arguments of `mod`."""
    if isinstance(mod, fx.GraphModule):
        nodes = mod.graph.find_nodes(op="placeholder")
        return tuple(
            node.meta.get(CAPTURE_NAME) or readable_name(node.name) for node in nodes[len(nodes) - count :]
        )
    return getattr(mod, "names", ()) or tuple(f"capture_{i}" for i in range(count))


def readable_name(placeholder: str) -> str:
    """`bias` from Dynamo's l_bias_, `self.table` from l_self_parameters_table_."""
    name = re.sub(r"^[lg]_(.*?)_*$", r"\1", placeholder.lower() if placeholder[:2] == "L_" else placeholder)
    return re.sub(r"_*(parameters|buffers|modules)_+", ".", name)


_CHECKED = "flex_inductor_lane_graph"


def lane_graph(mod: Callable, field: str, query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    """`mod` as an FX graph of aten ops, checked: what it returns, and that it only computes."""
    if isinstance(mod, fx.GraphModule) and mod.meta.get(_CHECKED):
        return mod
    lanes = SCORE_LANES if field == "score_mod" else MASK_LANES
    graph = trace_mod(mod, lanes, query, captures)
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    errors.check_mod_result(field, output.meta["val"] if isinstance(output, fx.Node) else output)
    check_ops(graph, field, (*lanes, *capture_names(mod, len(captures))))
    return mark_checked(graph)


def check_ops(graph: fx.GraphModule, field: str, names: Sequence[str]) -> None:
    """Refuse what must not happen anew for every score; `names` are those of the graph's arguments."""
    if written := written_placeholder(graph):
        position, op = written
        raise errors.capture_mutated(field, names[position], op)
    if drawn := random_op(graph):
        raise errors.mod_is_random(field, drawn)
    if beyond := number_beyond(graph):
        raise errors.number_beyond(field, *beyond)


def mark_checked(graph: fx.GraphModule) -> fx.GraphModule:
    """Say that `graph` needs no second look from `lane_graph`."""
    graph.meta[_CHECKED] = True
    return graph
