"""Values of a lane graph that depend on the two indices through their difference alone, as a relative bias does.

On a diagonal of a tile such a value is the same, and a whole call has as many as differences (for each head).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flex_inductor.mod_ir.program import LaneProgram
from flex_inductor.mod_ir.ranges import operation

from ..lanes import graph
from .index_ranges import INTEGERS

aten = torch.ops.aten

DIFFERENCE, HEAD, NUMBER = "difference", "head", "number"
MOST_EVALUATED = 1 << 20  # differences


class _Linear(NamedTuple):
    """How often q_idx and kv_idx are in a sum; numbers are not counted."""

    query: int
    key: int


def found(program: LaneProgram, tables: Container[fx.Node] = (), *, head: bool = True) -> dict[fx.Node, str]:
    """The values computed of the difference, of h and of numbers, in order, each with the first that it depends on.

    They may look up `tables`, without a guard. Without `head`, none depends on h.
    """
    query, key = (coordinate(program, name) for name in ("q_idx", "kv_idx"))
    linear = {query: _Linear(1, 0), key: _Linear(0, 1)}
    kinds = {coordinate(program, "h"): HEAD} if head else {}
    for node in graph(program.lane).nodes:
        if node.op != "call_function":
            continue
        if (total := _sum(node, linear)) is not None:
            linear[node] = total
            if total.query == -total.key:
                kinds[node] = DIFFERENCE if total.query else NUMBER
        elif _computed_of(node, kinds, tables):
            sources = {kinds.get(source) for source in node.all_input_nodes}
            kinds[node] = next((kind for kind in (DIFFERENCE, HEAD) if kind in sources), NUMBER)
    return kinds


def coordinate(program: LaneProgram, name: str) -> fx.Node:
    return graph(program.lane).find_nodes(op="placeholder")[program.lanes.index(name)]


def _sum(node: fx.Node, linear: dict[fx.Node, _Linear]) -> _Linear | None:
    name = operation(node.target)
    if name not in ("add", "sub", "neg") or node.kwargs or node.meta["val"].dtype not in INTEGERS:
        return None
    parts = [_Linear(0, 0) if isinstance(arg, int) else linear.get(arg) for arg in node.args]
    first, second = (*parts, _Linear(0, 0))[:2]
    if first is None or second is None:
        return None
    if name == "neg":
        return _Linear(-first.query, -first.key)
    sign = 1 if name == "add" else -1
    return _Linear(first.query + sign * second.query, first.key + sign * second.key)


def _computed_of(node: fx.Node, kinds: dict[fx.Node, str], tables: Container[fx.Node]) -> bool:
    if operation(node.target) in ("index", "_unsafe_index"):
        table, indices = node.args
        return (
            node.target is aten._unsafe_index.Tensor and table in tables and all(i in kinds for i in indices)
        )
    sources = node.all_input_nodes
    if not all(source in kinds for source in sources):
        return False
    # Numbers stay 0-d where others become tables, and give way to another dtype then.
    dtypes = {source.meta["val"].dtype for source in sources} - {torch.bool}
    return len(dtypes) <= 1 or all(kinds[source] != NUMBER for source in sources)


def static(*sizes: Any) -> tuple[int, ...] | None:
    """The sizes, if all are known while compiling."""
    found = [sympy.sympify(size) for size in sizes]
    return tuple(map(int, found)) if all(size.is_Integer for size in found) else None


def apart(nodes: Sequence[fx.Node], given: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph of its own that computes nodes of a lane graph from `given`."""
    made = fx.Graph()
    copies = {node: made.placeholder(node.name) for node in given}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            for source in node.all_input_nodes:
                copy(source)
            copies[node] = made.node_copy(node, copies.__getitem__)
        return copies[node]

    made.output(tuple(map(copy, nodes)))
    return fx.GraphModule({}, made)


def evaluated(program: LaneProgram, node: fx.Node, queries: int, keys: int) -> tuple[int, int] | None:
    """The least and the largest value of an index, where it is computed of the difference and of numbers alone."""
    count = queries + keys - 1
    if not 0 < count <= MOST_EVALUATED or found(program, head=False).get(node) != DIFFERENCE:
        return None
    given = [coordinate(program, name) for name in ("q_idx", "kv_idx")]
    dtype = given[0].meta["val"].dtype
    with unset_fake_temporarily():
        query, key = torch.tensor(queries - 1, dtype=dtype), torch.arange(count, dtype=dtype)
        (values,) = apart([node], given)(query, key)
        return int(values.min()), int(values.max())
