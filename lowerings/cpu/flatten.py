"""Places in neighbouring dimensions of a tensor as one: `bias[h, row, column]` at `row * columns + column`.

Done where both have slow values of the key in them: one table then holds all that is of the key. See regroup.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from flex_inductor.mod_ir.ranges import Range

from ..lanes import Mod, graph
from . import differences
from .index_ranges import LONGEST, bounds_of, needed
from .tables import of_one_index, with_table

aten = torch.ops.aten


def flatten(mod: Mod, sizes: dict[str, Any]) -> Mod:
    """The mod, its lane graph changed in place; `sizes` are those of b, h, q_idx and kv_idx."""
    lane = graph(mod.program.lane)
    of_key = of_one_index(lane, differences.coordinate(mod.program, "kv_idx"))
    slow = {node for node, takes_long in of_key.items() if takes_long}
    for node in lane.nodes:
        if slow.intersection(node.all_input_nodes):
            slow.add(node)
    return _leaves(_lookups(mod, slow), slow, bounds_of(sizes))


def _lookups(mod: Mod, slow: set[fx.Node]) -> Mod:
    """With views of the tensors that lanes look up."""
    lane = graph(mod.program.lane)
    named = mod.named
    for node in lane.find_nodes(op="call_function", target=aten._unsafe_index.Tensor):
        table, indices = node.args
        if not isinstance(tensor := named.get(table), ir.IRNode):
            continue
        sizes, found = _flat(indices, tensor.get_size(), tensor.get_stride(), slow, node)
        if len(sizes) == len(indices):
            continue
        view = lowerings[aten.view](tensor, sizes)
        mod, flat = with_table(mod, view, f"flat_{node.name}", table.meta["val"].new_empty([1] * len(sizes)))
        node.args = (flat, found)
    return mod


def _leaves(mod: Mod, slow: set[fx.Node], bounds: dict[str, Range]) -> Mod:
    """With fewer dimensions of what lanes add to, of which the epilogue gets views."""
    program = mod.program
    output = graph(program.lane).output_node()
    outputs, leaves = [mod.outputs[0]], []
    for (leaf, value, indices), sizes in zip(program.by_leaf(mod.outputs), mod.leaf_sizes, strict=True):
        # An index that may be negative counts from the end of its own dimension.
        within = all(needed(*at, bounds) == set() for at in zip(indices, sizes, strict=False))
        if within and len(indices) == len(sizes) and differences.static(*sizes):
            sizes, indices = _flat(indices, sizes, ir.FlexibleLayout.contiguous_strides(sizes), slow, output)
            if len(indices) < leaf.indices:
                known = (False,) * len(sizes)
                leaf = leaf._replace(
                    shape=(*map(int, sizes),), shape_is_invariant=known, indices=len(indices)
                )
        outputs += [value, *indices]
        leaves.append(leaf)
    if leaves == [*program.leaves]:
        return mod
    output.args = (tuple(outputs),)
    epilogue = copy.deepcopy(program.epilogue)
    sums = graph(epilogue).find_nodes(op="placeholder")
    for given, sizes in zip(sums, mod.leaf_sizes, strict=False):
        with graph(epilogue).inserting_after(given):
            view = graph(epilogue).call_function(aten.view.default, (given, sizes))
        given.replace_all_uses_with(view, lambda user, view=view: user is not view)
    return mod._replace(program=program._replace(leaves=tuple(leaves), epilogue=epilogue))


def _flat(
    indices: Sequence[fx.Node],
    sizes: Sequence[Any],
    strides: Sequence[Any],
    slow: set[fx.Node],
    user: fx.Node,
) -> tuple[list[Any], list[fx.Node]]:
    """Sizes and indices, with neighbours as one where that helps `user`."""
    sizes, strides, indices = [*sizes], [*strides], [*indices]
    for i in range(len(indices) - 1, 0, -1):
        of_two = indices[i - 1 : i + 1]
        lengths = differences.static(*sizes[i - 1 : i + 1])
        if lengths is None or lengths[0] * lengths[1] > LONGEST or not all(index in slow for index in of_two):
            continue
        if len({index.meta["val"].dtype for index in of_two}) > 1:
            continue
        if not V.graph.sizevars.statically_known_equals(strides[i - 1], strides[i] * lengths[1]):
            continue
        with user.graph.inserting_before(user):
            row = user.graph.call_function(aten.mul.Tensor, (of_two[0], lengths[1]))
            place = user.graph.call_function(aten.add.Tensor, (row, of_two[1]))
        row.meta["val"] = place.meta["val"] = of_two[0].meta["val"]
        slow.add(place)
        indices[i - 1 : i + 1], sizes[i - 1 : i + 1] = [place], [sympy.Integer(lengths[0] * lengths[1])]
        del strides[i - 1]
    return sizes, indices
