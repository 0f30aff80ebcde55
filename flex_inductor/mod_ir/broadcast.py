"""The lanes of a whole tile at once, for mods that only compute with numbers and look numbers up.

torch.vmap serves any mod. It takes one level for each axis of a tile, which costs a quarter of a millisecond. Where
every value of a lane is a single number, the same operations on tensors that broadcast against each other do.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from .arguments import is_number
from .program import AXES, LaneProgram

aten = torch.ops.aten

_LITERALS = (aten.full.default, aten.scalar_tensor.default)
_ELEMENTWISE = {  # and those that torch tags as pointwise
    aten._to_copy.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.floor_divide.default,
    aten.softplus_backward.default,
}

_known: WeakKeyDictionary[fx.GraphModule, fx.GraphModule | None] = WeakKeyDictionary()


def broadcasting(program: LaneProgram) -> Callable | None:
    """The lane program on tensors of the shape [b, h, q_idx, kv_idx]; None where it needs torch.vmap."""
    lane = program.lane
    if not isinstance(lane, fx.GraphModule):
        return None
    if lane not in _known:
        _known[lane] = _over_tiles(lane) if _computes_with_numbers(program, lane.graph) else None
    return _known[lane]


def along(axes: tuple[str, ...], tensor: Tensor) -> Tensor:
    """`tensor`, which has a dimension for each of `axes`, so that it broadcasts over a tile."""
    sizes = iter(tensor.shape)
    return tensor.reshape([next(sizes) if axis in axes else 1 for axis in AXES])


def _computes_with_numbers(program: LaneProgram, graph: fx.Graph) -> bool:
    placeholders = graph.find_nodes(op="placeholder")
    numbers = set(placeholders[: len(program.lanes) + len(program.guards)])
    numbers.update(node for node in placeholders if is_number(node.meta.get("val")))
    for node in graph.nodes:
        if node.op == "call_function" and _gives_number(node, numbers):
            numbers.add(node)
        elif node.op not in ("placeholder", "get_attr", "output"):
            return False
    return numbers.issuperset(graph.output_node().all_input_nodes)


def _gives_number(node: fx.Node, numbers: set[fx.Node]) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    if op is aten.index.Tensor:
        source, indices = node.args
        return (
            source.op in ("placeholder", "get_attr")
            and is_number(node.meta["val"])
            and numbers.issuperset(indices)
        )
    if op in _LITERALS:
        return is_number(node.meta["val"])
    return (torch.Tag.pointwise in op.tags or op in _ELEMENTWISE) and numbers.issuperset(node.all_input_nodes)


def _over_tiles(lane: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(lane.graph, {}))
    for node in graph.nodes:
        if node.target in _LITERALS:  # get the others' dimensions, which torch's type promotion depends on
            value = node.args[-1]
            node.target = aten.full.default
            node.args = ([1] * len(AXES), value)
    return fx.GraphModule(lane, graph)
