"""From the graph of a mod to its program: see program.py for the parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .arguments import JOINT_LANES, MASK_LANES, SCORE_LANES, SECOND_LANES, TANGENT_LANES
from .normal_form import SCATTERS, Scatter, compose_indexing, normalize, scatter_of, shape_of_zeros
from .program import AXES, LaneProgram, Leaf

aten = torch.ops.aten

# The arguments, by position, in which an op is linear (jointly, for `add` and the like).
_LINEAR_ARGUMENTS = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.neg.default: (0,),
    aten.mul.Tensor: (0, 1),
    aten.mul.Scalar: (0,),
    aten.div.Tensor: (0,),
    aten.div.Scalar: (0,),
    aten.sum.default: (0,),
    aten.sum.dim_IntList: (0,),
    aten.mean.default: (0,),
    aten.mean.dim: (0,),
    aten.expand.default: (0,),
    aten.view.default: (0,),
    aten._unsafe_view.default: (0,),
    aten.reshape.default: (0,),
    aten.permute.default: (0,),
    aten.transpose.int: (0,),
    aten.t.default: (0,),
    aten.squeeze.default: (0,),
    aten.squeeze.dim: (0,),
    aten.squeeze.dims: (0,),
    aten.unsqueeze.default: (0,),
    aten.clone.default: (0,),
    aten._to_copy.default: (0,),
    aten.select.int: (0,),
    aten.slice.Tensor: (0,),
    aten.select_backward.default: (0,),
    aten.slice_backward.default: (0,),
    aten.index.Tensor: (0,),
    aten.mm.default: (0, 1),
    aten.matmul.default: (0, 1),
    aten.constant_pad_nd.default: (0,),
    aten.as_strided.default: (0,),
    aten.flip.default: (0,),
    aten.cumsum.default: (0,),
    aten.threshold_backward.default: (0,),
    aten.tanh_backward.default: (0,),
    aten.sigmoid_backward.default: (0,),
    aten.gelu_backward.default: (0,),
    aten.silu_backward.default: (0,),
    aten.softplus_backward.default: (0,),
    aten._softmax_backward_data.default: (0,),
    aten._log_softmax_backward_data.default: (0,),
    aten.embedding_dense_backward.default: (0,),
    aten.new_zeros.default: (0,),
    aten.zeros_like.default: (0,),
    aten.index_put.default: (0, 2),
    aten._index_put_impl_.default: (0, 2),
    **dict.fromkeys(SCATTERS.values(), (0, 1)),
}
# Linear in each argument alone: if two depend on gradients the result is quadratic.
_BILINEAR = {aten.mul.Tensor, aten.mm.default, aten.matmul.default}


class Programs(NamedTuple):
    """The mods of one call, each split."""

    score: LaneProgram | None = None  # None where the score is used as it is
    mask: LaneProgram | None = None  # None where every lane is live
    joint: LaneProgram | None = None

    def text(self) -> str:
        """A key for what they compute."""
        return "\n".join(program.to_text() for program in self if program is not None)


class SecondPrograms(NamedTuple):
    """The same for derivatives beyond the gradient: see derivatives.py."""

    score: LaneProgram | None = None
    mask: LaneProgram | None = None
    joint: LaneProgram | None = None
    tangent: LaneProgram | None = None
    second: LaneProgram | None = None


_splits: WeakKeyDictionary[fx.GraphModule, dict[bool, LaneProgram]] = WeakKeyDictionary()


def programs(score_mod: Any, mask_mod: Any, joint: Any = None, *, guarded: bool) -> Programs:
    """The graphs of a call as programs. Each graph is split once, however often it is asked for."""
    return Programs(*_programs((score_mod, mask_mod, joint), guarded=guarded))


def second_programs(*graphs: Any, guarded: bool) -> SecondPrograms:
    return SecondPrograms(*_programs(graphs, guarded=guarded))


def _programs(graphs: Sequence[Any], *, guarded: bool) -> Iterator[LaneProgram | None]:
    for graph, lanes in zip(graphs, _LANES, strict=False):
        yield None if graph is None else _program(graph, lanes, guarded=guarded)


_LANES = (SCORE_LANES, MASK_LANES, JOINT_LANES, TANGENT_LANES, SECOND_LANES)


def _program(graph: fx.GraphModule, lanes: Sequence[str], *, guarded: bool) -> LaneProgram:
    known = _splits.setdefault(graph, {})
    if guarded not in known:
        known[guarded] = (
            with_guards(_program(graph, lanes, guarded=False)) if guarded else split(graph, lanes)
        )
    return known[guarded]


def split(module: fx.GraphModule, lanes: Sequence[str]) -> LaneProgram:
    """Cut `module(*lanes, *captures) -> value | (value, *gradients)` into a LaneProgram without guards."""
    return _Splitter(module, tuple(lanes)).run()


def with_guards(program: LaneProgram) -> LaneProgram:
    """`program` with `live` flags as further arguments: a lane that is not live reads index 0 of what it indexes.

    So a masked-out lane may have an index that is out of range.
    """
    module: Any = program.lane
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    placeholders = graph.find_nodes(op="placeholder")
    depends = _lane_dependence(graph, dict(zip(placeholders, program.lanes, strict=False)))
    loads = {
        node: _axes_of(frozenset().union(*(depends[n] for n in _nodes_in(node.args[1]))))
        for node in graph.nodes
        if node.target in (aten.index.Tensor, aten.index_put.default)
        and any(depends[n] for n in _nodes_in(node.args[1]))
    }
    guards = tuple(dict.fromkeys(loads.values()))
    following = next(node for node in graph.nodes if node not in placeholders[: len(program.lanes)])
    with graph.inserting_before(following):
        live = {axes: graph.placeholder("_".join(("live", *axes))) for axes in guards}
    for load, axes in loads.items():
        with graph.inserting_before(load):
            indices = [
                graph.call_function(aten.where.ScalarOther, (live[axes], index, 0))
                if isinstance(index, fx.Node)
                else index
                for index in load.args[1]
            ]
        load.args = (load.args[0], indices, *load.args[2:])
    lane = fx.GraphModule(module, graph)
    return program._replace(guards=guards, lane=lane, tensors=_tensors(lane, program.lanes, guards))


def _axes_of(depends: frozenset[str]) -> tuple[str, ...]:
    """Along which axes something varies; what depends on a score varies along all."""
    return tuple(axis for axis in AXES if axis in depends) if depends <= set(AXES) else AXES


def _lane_dependence(graph: fx.Graph, lanes: dict[fx.Node, str]) -> dict[fx.Node, frozenset[str]]:
    """The lane arguments that each node is computed from."""
    depends: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node in lanes:
            depends[node] = frozenset([lanes[node]])
        else:
            depends[node] = frozenset().union(*(depends[n] for n in node.all_input_nodes))
    return depends


class _Splitter:
    def __init__(self, module: fx.GraphModule, lanes: tuple[str, ...]):
        self.lane_names = lanes
        self.graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        output = self.graph.graph_copy(module.graph, copied)
        self.constants = module
        self.outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        self.graph.output(tuple(self.outputs))
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.lanes = placeholders[: len(lanes)]
        self.captures = placeholders[len(lanes) :]

    def run(self) -> LaneProgram:
        normalize(self.graph)
        compose_indexing(self.graph)
        self.outputs = list(next(n for n in self.graph.nodes if n.op == "output").args[0])
        self.depends = _lane_dependence(self.graph, dict(zip(self.lanes, self.lane_names, strict=True)))
        self._find_leaves()
        self.invariants = self._find_invariants()
        lane = self._lane()
        return LaneProgram(
            self.lane_names,
            (),
            tuple(self._leaf(node) for node in self.leaf_nodes),
            tuple(gradient is not None for gradient in self.outputs[1:]),
            _tensors(lane, self.lane_names, ()),
            self._prologue(),
            lane,
            self._epilogue(),
        )

    def _is_lane(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and bool(self.depends[node])

    def _find_leaves(self) -> None:
        """Mark the leaves, and the accumulating nodes after them, that each gradient comes from."""
        self.leaf_nodes: list[fx.Node] = []
        self.accumulated: set[fx.Node] = set()
        for node in self.outputs[1:]:
            if not self._is_lane(node):
                continue
            leaves: list[fx.Node] = []
            accumulated: set[fx.Node] = set()
            if not self._accumulate(node, leaves, accumulated):
                leaves, accumulated = [node], set()
            self.leaf_nodes += [leaf for leaf in leaves if leaf not in self.leaf_nodes]
            self.accumulated |= accumulated
        # A node that is summed whole for one gradient may still be cut into leaves for another.
        self.accumulated -= set(self.leaf_nodes)

    def _accumulate(self, node: fx.Node, leaves: list[fx.Node], accumulated: set[fx.Node]) -> bool:
        """Whether `node`, summed over lanes, is a linear map of sums of leaves: find those leaves."""
        if self._lane_scatter(node):
            leaves.append(node)
            return True
        if node.meta["val"].dim() == 0 and not self._comes_from_scatter(node):
            while (source := self._scaled(node)) is not None:
                accumulated.add(node)
                node = source
            leaves.append(node)
            return True
        linear = _LINEAR_ARGUMENTS.get(node.target)
        if linear is None:
            return False
        on_lanes = [i for i, arg in enumerate(node.args) if any(self._is_lane(n) for n in _nodes_in(arg))]
        if not set(on_lanes) <= set(linear) or (node.target in _BILINEAR and len(on_lanes) > 1):
            return False
        if not _sums_lanes_alone(node, on_lanes):
            return False
        accumulated.add(node)
        return all(self._accumulate(node.args[i], leaves, accumulated) for i in on_lanes)

    def _scaled(self, node: fx.Node) -> fx.Node | None:
        """The input that `node` rounds or scales alike in all lanes: this is done once, to the sum."""
        if node.target is aten._to_copy.default and _narrows(node.args[0], node):
            source = node.args[0]
        elif node.target in (aten.mul.Tensor, aten.div.Tensor, aten.neg.default):
            on_lanes = [i for i, argument in enumerate(node.args) if self._is_lane(argument)]
            if len(on_lanes) != 1 or on_lanes[0] not in _LINEAR_ARGUMENTS[node.target]:
                return None
            source = node.args[on_lanes[0]]
        else:
            return None
        return source if self._is_lane(source) else None

    def _comes_from_scatter(self, node: fx.Node) -> bool:
        stack, seen = [node], set()
        while stack:
            current = stack.pop()
            if scatter_of(current):
                return True
            if current not in seen:
                seen.add(current)
                stack.extend(current.all_input_nodes)
        return False

    def _lane_scatter(self, node: fx.Node) -> Scatter | None:
        """The parts of `node` if each lane adds a number or a row into a tensor whose shape does not depend on it."""
        scatter = scatter_of(node)
        if scatter is None or any(self._is_lane(n) for n in _nodes_in(scatter.shape)):
            return None
        row = scatter.shape[len(scatter.indices) :]
        sizes = [size.meta["val"] if isinstance(size, fx.Node) else size for size in row]
        one_place = all(index.meta["val"].dim() == 0 for index in scatter.indices)
        return scatter if one_place and list(scatter.value.meta["val"].shape) == sizes else None

    def _leaf_parts(self, node: fx.Node) -> tuple[list[Any], list[fx.Node], fx.Node]:
        shape, indices, value = self._lane_scatter(node) or ([], [], node)
        # Contributions are rounded to the capture's dtype after the sum, not before.
        while value.target is aten._to_copy.default and _narrows(value.args[0], value):
            value = value.args[0]
        return list(shape), list(indices), value

    def _leaf(self, node: fx.Node) -> Leaf:
        shape, indices, _ = self._leaf_parts(node)
        axes = _axes_of(frozenset().union(*(self.depends[i] for i in indices)))
        is_invariant = tuple(isinstance(size, fx.Node) for size in shape)
        sizes = tuple(self.invariants.index(s) if isinstance(s, fx.Node) else int(s) for s in shape)
        return Leaf(sizes, is_invariant, len(indices), axes)

    def _find_invariants(self) -> list[fx.Node]:
        """The values computed from captures alone that lanes, leaves or the epilogue use."""
        used: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node in self.leaf_nodes:  # an accumulator takes the place of its zeros
                shape, indices, value = self._leaf_parts(node)
                inputs = _nodes_in([*shape, *indices, value])
            elif self._is_lane(node) and node.op != "output":
                inputs = node.all_input_nodes
            else:
                continue
            used.update(dict.fromkeys(n for n in inputs if not self._is_lane(n)))
        used.update((n, None) for n in self.outputs if isinstance(n, fx.Node) and not self._is_lane(n))
        return [n for n in used if n.op != "placeholder" and not _is_literal(n)]

    def _copy(self, graph: fx.Graph, given: dict[fx.Node, fx.Node], wanted: Sequence[Any]) -> list[Any]:
        """Copy `wanted` and the nodes that they need into `graph`, except those `given`."""

        def copied(node: fx.Node) -> fx.Node:
            if node not in given:
                for needed in node.all_input_nodes:
                    copied(needed)
                given[node] = graph.node_copy(node, lambda n: given[n])
            return given[node]

        return fx.node.map_arg(list(wanted), copied)

    def _inputs(self, graph: fx.Graph, extra: Sequence[tuple[fx.Node, str]]) -> dict[fx.Node, fx.Node]:
        named = (*extra, *((c, c.name) for c in self.captures))
        return {node: _with_value(graph.placeholder(name), node) for node, name in named}

    def _module(self, graph: fx.Graph, outputs: Any) -> fx.GraphModule:
        graph.output(tuple(outputs))
        graph.eliminate_dead_code()
        return fx.GraphModule(self.constants, graph)

    def _prologue(self) -> fx.GraphModule:
        graph = fx.Graph()
        return self._module(graph, self._copy(graph, self._inputs(graph, ()), self.invariants))

    def _with_invariants(self, graph: fx.Graph, given: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        for i, node in enumerate(self.invariants):
            given[node] = _with_value(graph.placeholder(f"invariant_{i}"), node)
        return given

    def _lane(self) -> fx.GraphModule:
        graph = fx.Graph()
        given = self._inputs(graph, [*zip(self.lanes, self.lane_names, strict=True)])
        self._with_invariants(graph, given)
        outputs = [self.outputs[0]]
        for node in self.leaf_nodes:
            _, indices, value = self._leaf_parts(node)
            outputs += [value, *indices]
        return self._module(graph, self._copy(graph, given, outputs))

    def _epilogue(self) -> fx.GraphModule:
        graph = fx.Graph()
        given = self._inputs(graph, [(node, f"sum_{i}") for i, node in enumerate(self.leaf_nodes)])
        self._with_invariants(graph, given)
        return self._module(graph, self._copy(graph, given, self.outputs[1:]))


def _tensors(
    lane: fx.GraphModule, lanes: Sequence[str], guards: Sequence[tuple[str, ...]]
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """For each set of axes, the size of the largest tensor in a lane that varies along them."""
    given = [*((name,) if name in AXES else AXES for name in lanes), *guards]
    placeholders = lane.graph.find_nodes(op="placeholder")
    varies = {node: frozenset(axes) for node, axes in zip(placeholders, given, strict=False)}
    largest: dict[tuple[str, ...], int] = {}
    for node in lane.graph.nodes:
        if node not in varies:
            varies[node] = frozenset().union(*(varies[n] for n in node.all_input_nodes))
        axes = tuple(axis for axis in AXES if axis in varies[node])
        for value in pytree.tree_leaves(node.meta.get("val")) if axes else ():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                largest[axes] = max(largest.get(axes, 1), _typical(value.numel()))
    return tuple(largest.items())


def _with_value(placeholder: fx.Node, node: fx.Node) -> fx.Node:
    """`placeholder`, which knows the dtype of the tensor that it stands for."""
    if isinstance(value := node.meta.get("val"), torch.Tensor):
        placeholder.meta["val"] = value
    return placeholder


def _nodes_in(argument: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []

    def visit(node: fx.Node) -> fx.Node:
        nodes.append(node)
        return node

    fx.node.map_arg(argument, visit)
    return nodes


def _sums_lanes_alone(node: fx.Node, on_lanes: Sequence[int]) -> bool:
    """Whether all that `node` adds up depends on lanes: any other summand would be counted once for each lane."""
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return len(on_lanes) == 2
    if node.target in SCATTERS.values():
        return 1 in on_lanes and (0 in on_lanes or shape_of_zeros(node.args[0]) is not None)
    return True


def _typical(size: int | torch.SymInt) -> int:
    """A changing size is compared by its value when the mod was traced."""
    return size if isinstance(size, int) else size.node.hint or 1


def _is_literal(node: fx.Node) -> bool:
    """Whether it is a number; a tensor filled with one is read like any other."""
    return node.target is aten.full.default and not node.all_input_nodes and not node.args[0]


def _narrows(source: fx.Node, cast: fx.Node) -> bool:
    before, after = source.meta["val"].dtype, cast.meta["val"].dtype
    return before.is_floating_point and after.is_floating_point and before.itemsize >= after.itemsize
