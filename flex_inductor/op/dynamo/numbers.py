"""Python numbers that change from call to call, in a mod that Dynamo traces.

Such a number reaches the op as a 0-d tensor, so new values do not recompile. Nodes that depend on numbers and captured
tensors alone are computed before the op, where numbers are still numbers: sizes and slices need that. So are tensors
that the mod writes out as a list, which kernels cannot hold.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo import config
from torch._dynamo.utils import is_int_specialization_case
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._guards import GuardSource
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_iter, tree_map_only

from ... import compat
from ...mod_ir.arguments import number_dtype
from ...mod_ir.indexing import LaneIndexing, is_list_of_numbers
from .nodes import may_write

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def changing_numbers(tx: Any) -> Iterator[None]:
    """Lets numbers change wherever the mod that Dynamo traces inside finds them.

    Dynamo makes constants of integers in modules, globals and default arguments, and of a module's tuples. Inside they
    are constants only until one has changed. Dynamo reads a float as `.item()` of a tensor, in the mod's graph; inside
    that is done in the whole function's graph, so that others can use it. Dynamo traces in one thread at a time.
    """
    builders = VariableBuilder._type_dispatch()
    wrap_symfloat = VariableBuilder.wrap_symfloat

    def integer(builder: Any, value: int) -> Any:
        if not is_int_specialization_case(value, builder.source):
            return builders[int](builder, value)
        with config.patch(assume_static_by_default=True):
            return builder.wrap_symint(value)

    def tuple_of(builder: Any, value: tuple) -> Any:
        with patch.object(GuardSource, "is_unspecialized_nn_module", lambda source: False):
            return builders[tuple](builder, value)

    def symfloat(builder: Any, value: float) -> Any:
        with patch.object(tx.output, "tracers", tx.output.tracers[:1]):
            return wrap_symfloat(builder, value)

    changing = {**builders, int: integer, tuple: tuple_of}
    with patch.multiple(VariableBuilder, _type_dispatch=lambda builder: changing, wrap_symfloat=symfloat):
        yield


def float_to_tensor(tx: Any, like: Any, value: Any, dtype: torch.dtype) -> Any:
    """A Python float that changes from call to call, as a 0-d tensor.

    The product with a tensor keeps Dynamo from making it a constant and compiling for each value.
    """
    if not isinstance(value, fx.Proxy) or not _is_float(value.node):
        return value

    def made(op: str, target: Any, *args: Any) -> fx.Proxy:
        return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy(op, target, args, {})).as_proxy()

    def as_tensor(number: fx.Node, dtype: torch.dtype) -> fx.Proxy:
        # Not of `like`: under vmap it has a batch, and rules for batches take no number that changes.
        kind = {"dtype": dtype, "device": _example(like.as_proxy().node).device}
        one = wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", torch.ones, ([],), kind))
        return made("call_function", operator.mul, one.as_proxy(), fx.Proxy(number, value.tracer))

    def computed(node: fx.Node) -> fx.Proxy:
        """The same computation on tensors, one for each float that the number was computed from."""
        if not _is_float(node):
            return fx.Proxy(node, value.tracer)
        if not _computes_with_floats(node):
            return as_tensor(node, torch.float64)
        return made("call_function", node.target, *fx.node.map_arg(node.args, computed))

    if compat.COMPUTED_FLOATS_ARE_CONSTANTS and _computes_with_floats(value.node):
        return made("call_method", "to", computed(value.node), dtype)
    return as_tensor(value.node, dtype)


def _is_float(node: fx.Node) -> bool:
    return isinstance(_example(node), torch.SymFloat)


def _computes_with_floats(node: fx.Node) -> bool:
    of_operator = node.op == "call_function" and getattr(operator, node.target.__name__, None) is node.target
    return of_operator and any(map(_is_float, node.all_input_nodes))


def numbers_outside(
    tx: Any, query: Tensor, graph: fx.Graph, captures: Sequence[fx.Proxy], lanes: int
) -> list[fx.Proxy]:
    """The captures of `graph` after moving out of it whatever depends on numbers and captures alone.

    The op takes the remaining numbers as 0-d tensors. If an operation cannot, they are constants from here on, and
    another value recompiles.
    """
    return _Outside(tx, query, graph, captures, lanes).run()


class _Outside:
    def __init__(self, tx: Any, query: Tensor, graph: fx.Graph, captures: Sequence[fx.Proxy], lanes: int):
        self.tx, self.query, self.graph = tx, query, graph
        self.placeholders = graph.find_nodes(op="placeholder")[lanes:]
        self.outer: dict[fx.Node, Any] = dict(zip(self.placeholders, captures, strict=True))
        self.inner: dict[fx.Node, fx.Node] = {}  # a placeholder for each node that has moved and is used

    def run(self) -> list[fx.Proxy]:
        self._make_tensors_of_lists()
        nodes = [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]
        self.writes = any(map(may_write, nodes))
        moved = self._moved(nodes)
        for node in nodes:
            if node not in moved:
                for source in moved.intersection(node.all_input_nodes):
                    node.replace_input_with(source, self._placeholder(source))
                self._fix_numbers(node)
        for node in reversed(nodes):
            if node in moved:
                self.graph.erase_node(node)
        return [self.outer[placeholder] for placeholder in self.placeholders]

    def _make_tensors_of_lists(self) -> None:
        """Make tensors of indices that are lists: torch would do it where no tracer sees it."""
        for node in self.graph.nodes:
            if node.target not in (operator.getitem, operator.setitem):
                continue
            indexed, key, *value = node.args
            if not isinstance(_example(indexed), Tensor):
                continue
            device = _example(indexed).device
            with self.graph.inserting_before(node):
                if isinstance(key, tuple):
                    key = tuple(self._tensor_of_list(index, device) for index in key)
                else:
                    key = self._tensor_of_list(key, device)
            node.args = (indexed, key, *value)

    def _tensor_of_list(self, index: Any, device: torch.device) -> Any:
        if not is_list_of_numbers(index):
            return index
        made = self.graph.call_function(torch.tensor, ([*index],), {"device": device})
        with self.tx.fake_mode:
            made.meta["example_value"] = torch.tensor([*index], device=device)
        return made

    def _moved(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        # A tensor that is written to, or made where gradients are off, belongs where that happens.
        tensors_stay = self.writes or any("example_value" not in node.meta for node in nodes)
        moved = set(filter(_is_literal, nodes))
        known = moved.union(self.placeholders)
        for node in nodes:
            sources = node.all_input_nodes
            if not sources or not known.issuperset(sources):
                continue
            known.add(node)
            needs_numbers = any(
                _has_numbers(s) or (s in moved and not isinstance(_example(s), Tensor)) for s in sources
            )
            if _has_numbers(node) or (needs_numbers and not tensors_stay):
                moved.add(node)
        return moved

    def _placeholder(self, node: fx.Node) -> fx.Node:
        if node not in self.inner:
            first_operation = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(first_operation):
                self.inner[node] = inner = self.graph.placeholder(node.name)
            inner.meta["example_value"] = _example(node)
            self.outer[inner] = self._made_outside(node)
            self.placeholders.append(inner)
            if self.writes and _is_literal(node):  # into it, maybe
                with self.graph.inserting_before(first_operation):
                    self.inner[node] = own = self.graph.call_method("clone", (inner,))
                own.meta["example_value"] = _example(node)
        return self.inner[node]

    def _made_outside(self, node: fx.Node) -> Any:
        if node not in self.outer:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._made_outside)
            proxy = self.tx.output.create_proxy(node.op, node.target, args, kwargs)
            proxy.node.meta["example_value"] = _example(node)
            self.outer[node] = proxy
        return self.outer[node]

    def _fix_numbers(self, node: fx.Node) -> None:
        """Make constants of the numbers among `node`'s arguments if it cannot take tensors for them."""
        numbers = [source for source in node.all_input_nodes if _has_numbers(source)]
        if not numbers or self._takes_tensors(node):
            return
        constants = {source: tree_map_only(NUMBERS, _constant, _example(source)) for source in numbers}
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: constants.get(n, n))

    def _takes_tensors(self, node: fx.Node) -> bool:
        def given(source: fx.Node) -> Any:
            if source.op == "get_attr":  # the graphs of an autograd.Function
                return self.tx.output.nn_modules[source.target]
            return as_lane_tensor(_example(source), self.query)

        fake_mode = self.tx.fake_mode
        try:
            # Without an environment for symbols a fake tensor refuses to be read as a number.
            with patch.object(fake_mode, "shape_env", None), fake_mode, LaneIndexing():
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
                if node.op == "call_method":
                    getattr(args[0], node.target)(*args[1:], **kwargs)
                else:
                    node.target(*args, **kwargs)
        except Exception:  # for whatever reason the operation refuses a tensor
            return False
        return True


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_literal(node: fx.Node) -> bool:
    """Whether `node` is a tensor written out as a list."""
    return (
        node.target in (torch.tensor, torch.as_tensor)
        and not node.all_input_nodes
        and _example(node).dim() > 0
    )


def _has_numbers(node: fx.Node) -> bool:
    return any(isinstance(leaf, (int, float, *NUMBERS)) for leaf in tree_iter(_example(node)))


def _constant(number: Any) -> Any:
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(number)](number)


def number_of_a_lane(graph: fx.Graph, lanes: int) -> fx.Node | None:
    """The first Python number that the mod makes of something that differs from lane to lane."""
    differ = set(graph.find_nodes(op="placeholder")[:lanes])
    for node in graph.nodes:
        if not differ.isdisjoint(node.all_input_nodes):
            if node.op != "output" and _has_numbers(node):
                return node
            differ.add(node)
    return None


def tensor_sized_by_values(graph: fx.Graph) -> fx.Node | None:
    """The first tensor in the mod whose size is known only once it has run."""

    def unknown(node: fx.Node) -> set:
        example = node.meta.get("example_value")
        return free_unbacked_symbols(tuple(example.shape)) if isinstance(example, Tensor) else set()

    for node in graph.nodes:
        if node.op != "placeholder" and not unknown(node) <= set().union(*map(unknown, node.all_input_nodes)):
            return node
    return None


def as_lane_tensor(value: Any, query: Tensor) -> Any:
    """What the op makes of a number, or `value` itself."""
    dtype = number_dtype(value, query)
    return value if dtype is None else query.new_zeros((), dtype=dtype)
