"""Values of a mod that are slow to compute for each score: tables hold them, and lanes load them.

One has an entry for each key: vectors of integers have no division, so `kv_idx // width` would be computed one lane at
a time. Others have one for each query, head or batch: the compiler computes `exp2(-h)` anew for each vector of keys.
Another has one for each difference of key and query (and head), such as a relative bias: lanes of a row lie side by
side in it, whatever the mod's own table looks like. Values of keys that lie apart, as `positions[kv_idx, 0]`, are
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V, ops

from flex_inductor.mod_ir.ranges import Range, operation

from ..buffers import realized
from ..lanes import Mod, graph, outside
from . import differences
from .index_ranges import FOUND, INTEGERS, bounds_of, range_of
from .regroup import regroup

aten = torch.ops.aten

_SLOW = {"div", "floor_divide", "fmod", "pow", "remainder"}
_SLOW |= {"cos", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "sin", "tan", "tanh"}
_LOOKUPS = {"index", "_unsafe_index"}
FEW_ROWS = 32  # with fewer queries, a table of differences has about as many entries as there are scores


def with_tables(mod: Mod, sizes: dict[str, Any]) -> Mod:
    """The mod, its lane graph changed in place to load such values; `sizes` are those of b, h, q_idx and kv_idx."""
    mod = _with_differences(mod, sizes)
    key = differences.coordinate(mod.program, "kv_idx")
    lane = graph(mod.program.lane)
    regroup(lane, key, of_one_index(lane, key))
    for name, length in sizes.items():
        mod = _with_one_index(mod, name, length)
    return _with_copies(mod, sizes)


def _with_one_index(mod: Mod, name: str, length: Any) -> Mod:
    """The mod with tables of values of one index alone."""
    index = differences.coordinate(mod.program, name)
    slow = of_one_index(graph(mod.program.lane), index)
    ends = [node for node in slow if slow[node] and any(user not in slow for user in node.users)]
    if not ends:
        return mod
    tables = outside(differences.apart(ends, [index]), _places([length], 0, index.meta["val"].dtype))
    bounds = bounds_of({index.name: length})
    for node in ends:
        node.meta[FOUND] = range_of(node, bounds)
    return _loaded(mod, ends, slow, tables, [index])


def _with_copies(mod: Mod, sizes: dict[str, Any]) -> Mod:
    """The mod with copies of tensors in which the values of neighbouring keys lie apart."""
    rows = differences.static(sizes["q_idx"])
    if rows and rows[0] < FEW_ROWS:
        return mod
    batch, head, key = (differences.coordinate(mod.program, name) for name in ("b", "h", "kv_idx"))
    named = mod.named
    lookups = [node for node in graph(mod.program.lane).nodes if operation(node.target) in _LOOKUPS]
    for node in lookups:
        table, indices = node.args
        if not isinstance(tensor := named.get(table), ir.IRNode):
            continue
        if indices.count(key) != 1 or not {batch, head, key}.issuperset(indices):
            continue
        of_key = indices.index(key)
        apart = tensor.get_stride()[of_key]
        if any(V.graph.sizevars.statically_known_equals(apart, stride) for stride in (0, 1)):
            continue
        order = sorted(range(len(indices)), key=lambda dim: dim == of_key)
        copied = ir.ExternKernel.require_contiguous(lowerings[aten.permute](tensor, order))
        mod, given = with_table(mod, copied, f"copied_{node.name}", table.meta["val"])
        node.args = (given, [indices[dim] for dim in order])
    return mod


def _with_differences(mod: Mod, sizes: dict[str, Any]) -> Mod:
    static = differences.static(*(sizes[name] for name in ("q_idx", "kv_idx", "h")))
    if static is None or static[0] < FEW_ROWS:
        return mod
    queries, keys, heads = static
    program, lane = mod.program, graph(mod.program.lane)
    named, tables = mod.named, mod.tensor_nodes
    kinds = differences.found(program, tables)
    slow: dict[fx.Node, bool] = {}
    for node, kind in kinds.items():
        # A load takes less than turning integers into floats and computing with these.
        takes_long = operation(node.target) in _SLOW | _LOOKUPS or node.meta["val"].is_floating_point()
        slow[node] = kind == differences.DIFFERENCE and (
            takes_long or any(slow.get(source) for source in node.all_input_nodes)
        )
    ends = [node for node in kinds if slow[node] and any(user not in kinds for user in node.users)]
    if not ends:
        return mod
    for node in ends:
        if node.meta["val"].dtype in INTEGERS and (
            values := differences.evaluated(program, node, queries, keys)
        ):
            node.meta[FOUND] = Range(*map(sympy.Integer, values))
    query, key, head = (differences.coordinate(program, name) for name in ("q_idx", "kv_idx", "h"))
    dtype = key.meta["val"].dtype
    # Only the difference counts: all are those of the last query and of keys, some of them beyond the last.
    last = ir.Pointwise.create(
        device=torch.device("cpu"),
        dtype=dtype,
        inner_fn=lambda _: ops.constant(queries - 1, dtype),
        ranges=[1, 1],
    )
    places = _places([1, queries + keys - 1], 1, dtype), _places([heads, 1], 0, head.meta["val"].dtype)
    found = outside(
        differences.apart(ends, [query, key, head, *tables]), last, *places, *(named[node] for node in tables)
    )
    with lane.inserting_after(lane.find_nodes(op="placeholder")[-1]):
        ahead = lane.call_function(aten.sub.Tensor, (key, query))
    with lane.inserting_after(ahead):
        at = lane.call_function(aten.add.Tensor, (ahead, queries - 1))
    ahead.meta["val"] = at.meta["val"] = key.meta["val"]
    for end, table in zip(ends, found, strict=True):
        by_head = len(table.get_size()) == 2 and table.get_size()[0] != 1
        table = table if by_head else lowerings[aten.squeeze.dim](table, 0)
        mod = _loaded(mod, [end], kinds, [table], [head, at] if by_head else [at])
    return mod


def _loaded(
    mod: Mod, ends: Sequence[fx.Node], of_table: Any, tables: Sequence[Any], at: list[fx.Node]
) -> Mod:
    """The mod with `ends` loaded from tables, but where others of `of_table` use them."""
    lane = graph(mod.program.lane)
    for node, table in zip(ends, tables, strict=True):
        like = node.meta["val"].new_empty([1] * len(at))
        if like.dtype in (torch.bfloat16, torch.float16):  # lanes would round nothing
            like, table = like.float(), to_dtype(table, torch.float32)
        mod, given = with_table(mod, table, f"table_{node.name}", like)
        with lane.inserting_after(node):
            load = lane.call_function(aten._unsafe_index.Tensor, (given, at))
        load.meta |= {name: node.meta[name] for name in ("val", FOUND) if name in node.meta}
        node.replace_all_uses_with(load, lambda user: user not in of_table)
    lane.eliminate_dead_code()
    return mod


def with_table(mod: Mod, table: ir.IRNode, name: str, like: torch.Tensor) -> tuple[Mod, fx.Node]:
    """The mod, its lane graph changed in place to be given one more tensor, and the node that stands for it."""
    lane = graph(mod.program.lane)
    with lane.inserting_after(lane.find_nodes(op="placeholder")[-1]):
        given = lane.placeholder(name)
    given.meta["val"] = like
    return mod._replace(tables=[*mod.tables, _kept(table)]), given


def has_slow_lanes(mod: Mod) -> bool:
    """Whether lanes compute something slow that no table holds."""
    return any(operation(node.target) in _SLOW for node in graph(mod.program.lane).nodes)


def of_one_index(lane: fx.Graph, index: fx.Node) -> dict[fx.Node, bool]:
    """The nodes computed of an index and numbers alone, in order, and whether that is slow.

    Those of several dtypes are left out: a table's dtype counts where that of a 0-d tensor may not.
    """
    found: dict[fx.Node, bool] = {}
    for node in lane.nodes:
        sources = node.all_input_nodes
        if (
            node.op != "call_function"
            or not sources
            or any(s is not index and s not in found for s in sources)
        ):
            continue
        if len({source.meta["val"].dtype for source in sources}) == 1:
            found[node] = operation(node.target) in _SLOW or any(found.get(source) for source in sources)
    return found


def _places(sizes: list[Any], dim: int, dtype: torch.dtype) -> ir.TensorBox:
    """0, 1, 2, ... along a dimension, as values: Inductor would divide a loop's index by splitting the loop, and leave
    out its rest."""

    def place(index: Any) -> Any:
        return ops.bitwise_or(ops.index_expr(index[dim], dtype), ops.constant(0, dtype))

    return ir.Pointwise.create(device=torch.device("cpu"), dtype=dtype, inner_fn=place, ranges=sizes)


def _kept(table: ir.IRNode) -> ir.TensorBox:
    """As a view of a buffer: Inductor would compute one that reads nothing again in every lane."""
    buffer = realized(table)
    return ir.TensorBox(ir.ReinterpretView(data=buffer.data, layout=buffer.get_layout()))
