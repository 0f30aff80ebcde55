"""Which nodes of a graph write, and to what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def arguments_of(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operator's schema, each with what is given for it, or None."""
    arguments = op._schema.arguments
    given = {**dict(zip([a.name for a in arguments], args, strict=False)), **kwargs}
    return ((argument, given.get(argument.name)) for argument in arguments)


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node that writes, and what it writes to."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in arguments_of(node.target, node.args, node.kwargs):
            alias = argument.alias_info
            if alias is not None and alias.is_write and isinstance(value, fx.Node):
                yield node, value


def writes_to_views(graph: fx.Graph) -> bool:
    """Whether a part of a tensor that the graph made is written to: the tensor must change with it."""
    return any(
        written is not (storage := storage_of(written)) and storage.op != "placeholder"
        for _, written in writes(graph)
    )


def storage_of(node: Any) -> Any:
    """The node whose memory `node` has: what it is a view of, or itself."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(a.alias_info for a in schema.arguments):
            return node
        node = node.args[0]
    return node
