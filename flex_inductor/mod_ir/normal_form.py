"""One form for the graph of a mod, whoever traced or decomposed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims

_SAME_AS = {
    aten.index_put_.default: aten.index_put.default,
    aten._unsafe_index_put.default: aten.index_put.default,
    aten._unsafe_index.Tensor: aten.index.Tensor,
    aten.clone: aten.clone.default,
}


def normalize(graph: fx.Graph) -> None:
    """Undo what Inductor's passes over a subgraph spell differently."""
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        _scatter_instead(graph, write)
    for node in list(graph.nodes):
        if str(node.target) == "prims.fma.default":  # exists once Inductor is imported
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, node.args[:2])
            product.meta = dict(node.meta)
            node.target, node.args = aten.add.Tensor, (product, node.args[2])
        node.target = _SAME_AS.get(node.target, node.target)
        if node.target is prims.convert_element_type.default:
            node.target, node.kwargs, node.args = (
                aten._to_copy.default,
                {"dtype": node.args[1]},
                node.args[:1],
            )
        elif node.target in _SLICES:
            _clamp_slice(node, _SLICES[node.target])
        elif node.target is aten.neg.default and _is_cast(cast := node.args[0]):
            # The negation of a cast becomes the cast of a negation: a cast that comes last can be applied to a sum.
            with graph.inserting_before(node):
                negative = graph.call_function(aten.neg.default, cast.args)
            negative.meta = dict(cast.args[0].meta)
            node.target, node.args, node.kwargs = cast.target, (negative,), cast.kwargs


# Ops that take a slice -> which argument is its dimension; start and end are the next two.
_SLICES = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2}


def _clamp_slice(node: fx.Node, at: int) -> None:
    """Replace the end of `t[1:]`, the largest integer, by the length: torch's vmap overflows on it."""
    dim, start, end = (*node.args[at:], *(0, None, None)[len(node.args) - at :])[:3]
    size = node.args[0].meta["val"].shape[dim]
    if isinstance(size, int) and all(n is None or isinstance(n, int) for n in (start, end)):
        start, end, _ = slice(start, end).indices(size)
        node.args = (*node.args[:at], dim, start, max(start, end), *node.args[at + 3 :])


# Views -> the op that gives a tensor with other values there.
SCATTERS = {
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


def _scatter_instead(graph: fx.Graph, write: fx.Node) -> None:
    """`view(t).copy_(x)` becomes a tensor of its own, which is read from there on instead of `t`."""
    at, value = write.args
    if at.target not in SCATTERS:
        return
    while at.target in SCATTERS:
        whole, *where = at.args
        with graph.inserting_before(write):
            scattered = graph.call_function(SCATTERS[at.target], (whole, value, *where), dict(at.kwargs))
        scattered.meta = dict(whole.meta)
        at, value = whole, scattered
    at.replace_all_uses_with(value, lambda user: user > write)
    graph.erase_node(write)


def _is_cast(node: fx.Node) -> bool:
    """Whether it turns floats of one kind into floats of another."""
    return node.target is aten._to_copy.default and all(
        n.meta["val"].is_floating_point() for n in (node, node.args[0])
    )


def compose_indexing(graph: fx.Graph) -> None:
    """t[i][j] becomes t[i, j], forward and backward, so that no lane holds a whole row."""
    for node in list(graph.nodes):
        if node.target is aten.index.Tensor and (inner := node.args[0]).target is aten.index.Tensor:
            indices = [*inner.args[1], *node.args[1]]
            if _all_single(indices):
                node.args = (inner.args[0], indices)
        else:
            _compose_scatter(graph, node)
    graph.eliminate_dead_code()


def _all_single(indices: Sequence[Any]) -> bool:
    return all(isinstance(index, fx.Node) and index.meta["val"].dim() == 0 for index in indices)


def _compose_scatter(graph: fx.Graph, node: fx.Node) -> None:
    outer = scatter_of(node)
    if outer is None:
        return
    if inner := scatter_of(outer.value):
        if _all_single(indices := [*outer.indices, *inner.indices]):
            node.args = (node.args[0], indices, inner.value, True)
    elif _adds_alike(outer.value):  # row[i] + row[j], with row = t[h]
        with graph.inserting_before(node):
            parts = [
                graph.call_function(node.target, (*node.args[:2], part, True)) for part in outer.value.args
            ]
            total = graph.call_function(aten.add.Tensor, tuple(parts))
        for new in (*parts, total):
            new.meta = dict(node.meta)
        for part in parts:
            _compose_scatter(graph, part)
        node.replace_all_uses_with(total)


def _adds_alike(node: fx.Node) -> bool:
    """Whether `node` is the sum of two tensors of its own shape."""
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(n, fx.Node) and n.meta["val"].shape == node.meta["val"].shape for n in node.args)
    )


class Scatter(NamedTuple):
    shape: list[Any]
    indices: list[fx.Node]
    value: fx.Node


def scatter_of(node: fx.Node) -> Scatter | None:
    """The parts of `node` if it adds a value into zeros at lane indices: what indexing differentiates to."""
    if node.target is not aten.index_put.default or node.args[3:] != (True,):
        return None
    zeros, indices, value, _ = node.args
    shape = shape_of_zeros(zeros)
    if shape is not None and all(isinstance(i, fx.Node) for i in indices):
        return Scatter(list(shape), list(indices), value)
    return None


def shape_of_zeros(node: fx.Node) -> Sequence[Any] | None:
    """The shape that `node` fills with zeros, in the spellings that tracing and decompositions use."""
    if node.target is aten.new_zeros.default:
        return node.args[1]
    if node.target is aten.zeros.default or (node.target is aten.full.default and node.args[1] == 0):
        return node.args[0]
    return None
