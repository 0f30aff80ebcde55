"""What the nodes of a mod may do, in Dynamo's graph of it."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_iter

_COMPUTE = {
    *(operator.add, operator.sub, operator.mul, operator.neg),
    *(operator.truediv, operator.floordiv, operator.mod),
    *(operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt),
    *(operator.and_, operator.or_, operator.xor, operator.invert, operator.getitem),
    *(torch.where, torch.minimum, torch.maximum, torch.abs, torch.exp, torch.log, torch.tanh, torch.sigmoid),
    *("abs", "exp", "log", "tanh", "sigmoid", "float"),  # methods
}


def only_computes(graph: fx.Graph) -> bool:
    """Whether no check of the mod can refuse it: most are a few known functions of numbers that fit their tensors."""
    of_tensors = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not all(isinstance(t, Tensor) and not t.is_complex() for t in of_tensors):
        return False
    if not all(node.op in ("call_function", "call_method") and node.target in _COMPUTE for node in nodes):
        return False
    numbers = [
        n for node in nodes for n in tree_iter((node.args, node.kwargs)) if isinstance(n, (int, float))
    ]
    most = min(_largest(t.dtype) for t in of_tensors)
    return all(abs(number) <= most or math.isinf(number) for number in numbers)


def _largest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return math.inf
    return (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max


def may_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph looks like one that writes to a tensor, or has graphs of its own that may."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:  # iadd writes, and_ does not
        return name == "setitem" or (name[0] == "i" and hasattr(operator, f"__{name[1:]}__"))
    return node.op == "call_function" and (name.endswith("_") or "out" in node.kwargs)
