"""Sums of a mod's integers in another order: first what is of the key alone, and numbers, which one table then holds.

So `q_idx // 8 - kv_idx // 8 + 7`, where a bias has its number for two rows of an image, is one addition for each vector
of lanes. A sum that wraps around has the same result in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from flex_inductor.mod_ir.ranges import operation

aten = torch.ops.aten

_SIGNS = {"add": (1, 1), "neg": (-1,), "rsub": (-1, 1), "sub": (1, -1)}


def regroup(lane: fx.Graph, key: fx.Node, slow: Mapping[fx.Node, bool]) -> None:
    """Change sums of integers in place; `slow` has the nodes of the key alone, and whether they are slow to compute."""
    for node in [node for node in lane.nodes if _is_sum(node)]:
        if node in slow or all(map(_is_sum, node.users)):
            continue
        terms, number = _terms(node)
        of_key = {term: times for term, times in terms.items() if term is key or term in slow}
        others = {term: times for term, times in terms.items() if term not in of_key}
        if not any(slow.get(term) for term in of_key) or (len(of_key) == 1 and not number):
            continue
        with lane.inserting_before(node):
            columns = _sum_of(lane, of_key, number, node.meta["val"])
            total = _sum_of(lane, {**others, columns: 1}, 0, node.meta["val"])
        node.replace_all_uses_with(total)
    lane.eliminate_dead_code()


def _is_sum(node: fx.Node) -> bool:
    """Of integers of one dtype."""
    if node.op != "call_function" or operation(node.target) not in _SIGNS or node.kwargs:
        return False
    dtypes = {getattr(part.meta.get("val"), "dtype", None) for part in (node, *node.all_input_nodes)}
    numbers = [argument for argument in node.args if not isinstance(argument, fx.Node)]
    return dtypes in ({torch.int32}, {torch.int64}) and all(type(number) is int for number in numbers)


def _terms(node: Any) -> tuple[dict[fx.Node, int], int]:
    """What a sum consists of: nodes and how often each is added, and a number."""
    if isinstance(node, int):
        return {}, node
    if not _is_sum(node):
        return {node: 1}, 0
    found: dict[fx.Node, int] = {}
    number = 0
    for sign, argument in zip(_SIGNS[operation(node.target)], node.args, strict=True):
        terms, added = _terms(argument)
        number += sign * added
        for term, times in terms.items():
            found[term] = found.get(term, 0) + sign * times
    return {term: times for term, times in found.items() if times}, number


def _sum_of(lane: fx.Graph, terms: dict[fx.Node, int], number: int, like: torch.Tensor) -> fx.Node:
    def made(target: Any, *args: Any) -> fx.Node:
        node = lane.call_function(target, args)
        node.meta["val"] = like
        return node

    total: fx.Node | None = None
    for term, times in sorted(
        terms.items(), key=lambda pair: -pair[1]
    ):  # those that are subtracted come last
        if total is not None and times == -1:
            total = made(aten.sub.Tensor, total, term)
            continue
        product = term if times == 1 else made(aten.mul.Tensor, term, times)
        total = product if total is None else made(aten.add.Tensor, total, product)
    assert total is not None
    least = torch.iinfo(like.dtype).min
    number = (number - least) % (-2 * least) + least  # as it wraps around
    return made(aten.add.Tensor, total, number) if number else total
