"""What a mod computes of kv_idx alone, where that is slow: once for each key, not for each score.

Vectors of integers have no division, so `kv_idx // width` would be computed one lane at a time. A table over the keys
of the call holds it instead, and lanes load it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.virtualized import ops

from ..buffers import realized
from ..lanes import Mod, graph, outside

aten = torch.ops.aten

_SLOW = {"div", "exp", "floor_divide", "fmod", "log", "pow", "remainder"}


def with_columns(mod: Mod, length: Any) -> Mod:
    """The mod, its lane graph changed in place to load such values; `length` is the number of keys."""
    lane = graph(mod.program.lane)
    placeholders = lane.find_nodes(op="placeholder")
    key = placeholders[mod.program.lanes.index("kv_idx")]
    slow = _of_key_alone(lane, key)
    ends = [node for node in slow if slow[node] and any(user not in slow for user in node.users)]
    if not ends:
        return mod
    apart = fx.Graph()
    copies = {key: apart.placeholder("kv_idx")}
    for node in slow:
        copies[node] = apart.node_copy(node, copies.__getitem__)
    apart.output(tuple(copies[node] for node in ends))
    apart.eliminate_dead_code()
    columns = outside(fx.GraphModule({}, apart), _places(length, key.meta["val"].dtype))
    for node, column in zip(ends, columns, strict=True):
        with lane.inserting_after(lane.find_nodes(op="placeholder")[-1]):
            table = lane.placeholder(f"column_{node.name}")
        table.meta["val"] = node.meta["val"].new_empty(1)
        with lane.inserting_after(node):
            load = lane.call_function(aten._unsafe_index.Tensor, (table, [key]))
        load.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(load, lambda user: user not in slow)
        mod = mod._replace(columns=[*mod.columns, _kept(column)])
    lane.eliminate_dead_code()
    return mod


def _of_key_alone(lane: fx.Graph, key: fx.Node) -> dict[fx.Node, bool]:
    """The nodes computed of kv_idx and numbers alone, in order, and whether that is slow.

    Those of several dtypes are left out: a table's dtype counts where that of a 0-d tensor may not.
    """
    found: dict[fx.Node, bool] = {}
    for node in lane.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or any(s is not key and s not in found for s in sources):
            continue
        if len({source.meta["val"].dtype for source in sources}) == 1:
            name = node.target.overloadpacket.__name__
            found[node] = name in _SLOW or any(found.get(source) for source in sources)
    return found


def _places(length: Any, dtype: torch.dtype) -> ir.TensorBox:
    """0, 1, 2, ... as values: Inductor would divide a loop's index by splitting the loop, and leave out its rest."""

    def place(index: Any) -> Any:
        return ops.bitwise_or(ops.index_expr(index[0], dtype), ops.constant(0, dtype))

    return ir.Pointwise.create(device=torch.device("cpu"), dtype=dtype, inner_fn=place, ranges=[length])


def _kept(column: ir.TensorBox) -> ir.TensorBox:
    """As a view of a buffer: Inductor would compute one that reads nothing again in every lane."""
    buffer = realized(column)
    return ir.TensorBox(ir.ReinterpretView(data=buffer.data, layout=buffer.get_layout()))
