"""Sums of a mod's integers in another order: first what is of the key alone, and numbers, which one table then holds.

So `q_idx // 8 - kv_idx // 8 + 7`, a place in a bias for the offsets of an image, takes one addition for each vector of
lanes. Sums are multiplied out where they are multiplied by a number. One that wraps around has the same result in any
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from flex_inductor.mod_ir.ranges import operation

aten = torch.ops.aten

_SIGNS = {"add": (1, 1), "neg": (-1,), "rsub": (-1, 1), "sub": (1, -1)}


class _Sum(NamedTuple):
    terms: dict[fx.Node, int]  # how often each is added
    number: int


def regroup(lane: fx.Graph, key: fx.Node, slow: Mapping[fx.Node, bool]) -> None:
    """Change sums of integers in place; `slow` has the nodes of the key alone, and whether they are slow to compute."""
    sums: dict[fx.Node, _Sum] = {}
    for node in list(lane.nodes):
        if not _is_sum(node):
            continue
        terms, number = sums[node] = _flat(node, sums)
        if node in slow or all(map(_is_sum, node.users)):
            continue
        of_key = {term: times for term, times in terms.items() if term is key or term in slow}
        others = {term: times for term, times in terms.items() if term not in of_key}
        alone = not number and [*map(abs, of_key.values())] == [1]
        if not any(slow.get(term) for term in of_key) or alone:
            continue
        with lane.inserting_before(node):
            columns = _made(lane, _Sum(of_key, number), node.meta["val"])
            total = _made(lane, _Sum({**others, columns: 1}, 0), node.meta["val"])
        node.replace_all_uses_with(total, lambda user: not _is_sum(user))
    lane.eliminate_dead_code()


def _is_sum(node: fx.Node) -> bool:
    """Of integers of one dtype."""
    if node.op != "call_function" or not _operands(node) or node.kwargs:
        return False
    dtypes = {getattr(part.meta.get("val"), "dtype", None) for part in (node, *node.all_input_nodes)}
    numbers = [argument for argument in node.args if not isinstance(argument, fx.Node)]
    return dtypes in ({torch.int32}, {torch.int64}) and all(type(number) is int for number in numbers)


def _operands(node: fx.Node) -> list[tuple[int, Any]]:
    """What a sum adds up, and how often; nothing for another node."""
    name = operation(node.target)
    if name == "mul" and isinstance(node.args[1], int):
        return [(node.args[1], node.args[0])]
    return [*zip(_SIGNS[name], node.args, strict=True)] if name in _SIGNS else []


def _flat(node: fx.Node, sums: Mapping[fx.Node, _Sum]) -> _Sum:
    """The sum that a node is, with those among its operands opened."""
    terms: dict[fx.Node, int] = {}
    number = 0
    for by, operand in _operands(node):
        opened = _Sum({}, operand) if isinstance(operand, int) else sums.get(operand, _Sum({operand: 1}, 0))
        number += by * opened.number
        for term, times in opened.terms.items():
            terms[term] = terms.get(term, 0) + by * times
    wrapped = {term: _wrapped(times, node) for term, times in terms.items()}
    return _Sum({term: times for term, times in wrapped.items() if times}, _wrapped(number, node))


def _wrapped(number: int, node: fx.Node) -> int:
    """As in the dtype of a node."""
    least = torch.iinfo(node.meta["val"].dtype).min
    return (number - least) % (-2 * least) + least


def _made(lane: fx.Graph, wanted: _Sum, like: torch.Tensor) -> fx.Node:
    def made(target: Any, *args: Any) -> fx.Node:
        node = lane.call_function(target, args)
        node.meta["val"] = like
        return node

    total: fx.Node | None = None
    # Those that are subtracted come last.
    for term, times in sorted(wanted.terms.items(), key=lambda pair: -pair[1]):
        if total is not None and times == -1:
            total = made(aten.sub.Tensor, total, term)
            continue
        product = term if times == 1 else made(aten.mul.Tensor, term, times)
        total = product if total is None else made(aten.add.Tensor, total, product)
    assert total is not None
    return made(aten.add.Tensor, total, wanted.number) if wanted.number else total
