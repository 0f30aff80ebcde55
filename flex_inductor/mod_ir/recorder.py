"""From a function of lanes to its FX graph of aten ops, in microseconds and without Dynamo or sympy.

tracer.py gives kernels the same, with gradients and with sizes that change. It takes ten times as long, too long for a
mask that may be traced on every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from . import errors
from .checks import number_beyond_in_call

aten = torch.ops.aten

READS = "reads"  # the key of a node's meta for the lanes that its value depends on

# Their value does not depend on what their tensor argument holds.
_VALUE_FREE = {
    aten.new_ones,
    aten.new_zeros,
    aten.new_full,
    aten.ones_like,
    aten.zeros_like,
    aten.full_like,
}


class NeedsValue(Exception):
    """The function asks for the value of a tensor that is not made of literals alone."""


class Recorder(TorchDispatchMode):
    """Runs a function once and records its calls; equal calls are one node. Captures are attributes."""

    def __init__(self, mod: str, captures: Callable[[Tensor], str]):
        """`mod` and `captures` say in errors what the function and a tensor are called."""
        super().__init__()
        self.mod, self.name_of = mod, captures
        self.graph = fx.Graph()
        self.captures: dict[fx.Node, Tensor] = {}
        self.writes = False  # whether the function changes what it made itself
        self._nodes: dict[int, fx.Node] = {}  # by the id of a tensor
        self._met: list[Tensor] = []  # kept alive, so that no two have one id
        self._calls: dict[Any, fx.Node] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch.compiler.disable would import Dynamo, which takes a second. masks/in_graph.py tells it once loaded.
        return False

    def run(self, function: Callable[..., Any], lanes: dict[str, Tensor]) -> Any:
        """What the function returns; `graph` then ends in it."""
        for name, lane in lanes.items():
            self._is(lane, self.graph.placeholder(name), frozenset([name]))
        with self:
            result = function(*lanes.values())
        if isinstance(result, Tensor):
            self.graph.output(self._node_of(result))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise errors.mod_is_random(self.mod, str(func))
        if func._schema.is_mutable:
            if isinstance(args[0], Tensor) and id(args[0]) not in self._nodes:
                raise errors.capture_mutated(self.mod, self.name_of(args[0]), str(func))
            self.writes = True
            return func(*args, **kwargs)
        node_args = tuple(map(self._described, args))
        node_kwargs = {name: self._described(value) for name, value in kwargs.items()}
        if func is aten._local_scalar_dense.default and not self._is_literal(node_args[0]):
            raise NeedsValue(".item() of what is not a constant")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._call(func, node_args, node_kwargs, result)
        elif isinstance(result, (tuple, list)):
            several = self._call(func, node_args, node_kwargs, None)
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._call(operator.getitem, (several, i), {}, part)
        return result

    def _node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; a tensor that no node made is a capture."""
        if id(tensor) not in self._nodes:
            node = self.graph.create_node("get_attr", f"capture_{len(self.captures)}")
            self.captures[node] = tensor
            self._is(tensor, node, frozenset())
        return self._nodes[id(tensor)]

    def _described(self, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [*map(self._described, argument)]
        return self._node_of(argument) if isinstance(argument, Tensor) else argument

    def _is_literal(self, node: fx.Node) -> bool:
        if node in self.captures:
            return False
        return not node.meta[READS] and all(map(self._is_literal, node.all_input_nodes))

    def _call(self, func: Any, args: Any, kwargs: Any, result: Tensor | None) -> fx.Node:
        key = func, _key(args), _key(sorted(kwargs.items()))
        node = self._calls.get(key)
        if node is None:
            node = self._calls[key] = self.graph.create_node("call_function", func, args, kwargs)
            free = getattr(func, "overloadpacket", None) in _VALUE_FREE
            reads = () if free else (n.meta[READS] for n in node.all_input_nodes)
            node.meta[READS] = frozenset().union(*reads)
            tensors = [result, *(source.meta.get("val") for source in node.all_input_nodes)]
            if beyond := number_beyond_in_call(func, args, kwargs, tensors):
                raise errors.number_beyond(self.mod, *beyond)
        if result is not None:
            self._is(result, node, node.meta[READS])
        return node

    def _is(self, tensor: Tensor, node: fx.Node, reads: frozenset[str]) -> None:
        self._nodes[id(tensor)] = node
        self._met.append(tensor)
        # Graphs are freed late, so they must not keep values.
        node.meta.setdefault("val", torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        node.meta[READS] = reads


def _key(value: Any) -> Any:
    """The same for arguments that are the same to torch: 1, 1.0 and True are equal, 0.0 and -0.0 are."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))
