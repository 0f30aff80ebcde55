"""How Dynamo traces a call of the ops: both mods become subgraphs, what they capture becomes inputs.

Imported only once Dynamo itself is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import (
    TorchHigherOrderOperatorVariable,
    add_hop_context,
    discard_graph_changes,
    make_attr,
    speculate_subgraph,
)
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from .. import compat, errors
from .hop import attention, attention_backward
from .tracing import INDEX_DTYPE, MASK_LANES, SCORE_LANES, LaneIndexing, score_dtype


@add_hop_context
class AttentionVariable(TorchHigherOrderOperatorVariable):
    """The forward op: `score_mod` and `mask_mod` are traced, everything else is passed on."""

    _HOP_NAME = "flex_inductor.op.attention"

    def _call_function(self, tx, args, kwargs):
        query, key, value, schedule, score_mod, mask_mod, scale, options = args[:8]
        # A graph that was traced before has its captures among the arguments already.
        given_score, given_mask = (captures.items for captures in args[8:]) if args[8:] else ((), ())
        score, score_captures = self._subgraph(tx, query, score_mod, "score_mod", SCORE_LANES, given_score)
        mask, mask_captures = self._subgraph(tx, query, mask_mod, "mask_mod", MASK_LANES, given_mask)
        lists = _with_static_block_sizes(tx, schedule)
        call = (
            *(arg.as_proxy() for arg in (query, key, value, lists)),
            score,
            mask,
            _float_to_tensor(tx, query, scale.as_proxy()),
            options.as_proxy(),
            score_captures,
            mask_captures,
        )
        proxy = tx.output.create_proxy("call_function", self.value, args=call, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _subgraph(self, tx, query, mod, name, lanes, given) -> tuple[Any, tuple]:
        if mod.is_python_constant() and mod.as_python_constant() is None:
            return None, ()
        lane_args = self._lane_args(tx, query, lanes)
        try:
            with LaneIndexing():
                (result, _), graph, lifted = speculate_subgraph(
                    tx,
                    mod,
                    [*lane_args, *given],
                    {},
                    description=f"flex_attention's {name}",
                    source_target=self.value,
                    set_subgraph_inputs="flatten_manual",
                )
        except TypeError as error:
            self._refuse(f"{name} cannot be called as {', '.join(lanes)}: {error}")
        try:
            errors.check_mod_result(name, _example_of(result))
        except errors.FlexError as error:
            self._refuse(str(error))
        outer = [*(capture.as_proxy() for capture in given), *lifted]
        captures = tuple(_float_to_tensor(tx, query, c) for c in _drop_unused(graph, outer, len(lanes)))
        module = fx.GraphModule(tx.output.nn_modules, graph)
        return make_attr(tx, tx.output.install_subgraph(name, module)), captures

    def _lane_args(self, tx, query, lanes) -> list:
        build = compat.dynamo_constant
        floats = score_dtype(_example_of(query).dtype)
        with discard_graph_changes(tx):
            return [
                query.call_method(
                    tx,
                    "new_zeros",
                    [build(tx, [])],
                    {"dtype": build(tx, floats if name == "score" else INDEX_DTYPE)},
                )
                for name in lanes
            ]

    def _refuse(self, message: str) -> None:
        """A graph break: eager then raises the same message, or Dynamo does where breaks are not allowed."""
        unimplemented(
            gb_type="flex_attention refused the call",
            context=message,
            explanation=message,
            hints=[],
        )


def _example_of(variable: Any) -> Any:
    with contextlib.suppress(NotImplementedError, AttributeError, Unsupported):
        proxy = variable.as_proxy()
        return proxy.node.meta["example_value"] if isinstance(proxy, fx.Proxy) else proxy
    return variable


def _with_static_block_sizes(tx: Any, schedule: Any) -> Any:
    """Kernels are made for a block size, so it is not a symbol even where every integer may be."""
    sizes = [
        compat.dynamo_constant(tx, size.evaluate_expr()) if isinstance(size, SymNodeVariable) else size
        for size in schedule.items[:2]
    ]
    return TupleVariable([*sizes, *schedule.items[2:]])


def _float_to_tensor(tx: Any, query: Any, value: Any) -> Any:
    """A Python float that changes from call to call, as a 0-d tensor.

    Multiplying a tensor is what keeps Dynamo from making a constant of it, and compiling for each value.
    """
    if not isinstance(value, fx.Proxy) or not isinstance(value.node.meta["example_value"], torch.SymFloat):
        return value
    dtype = score_dtype(_example_of(query).dtype)
    one = query.call_method(tx, "new_ones", [compat.dynamo_constant(tx, [])], {"dtype": compat.dynamo_constant(tx, dtype)})
    product = tx.output.create_proxy("call_function", operator.mul, (one.as_proxy(), value), {})
    return wrap_fx_proxy(tx=tx, proxy=product).as_proxy()


def _drop_unused(graph: fx.Graph, captures: Sequence[Any], lanes: int) -> tuple:
    """Captures that the mod turned out not to read, such as a query of which it only used the length."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"][lanes:]
    kept = []
    for placeholder, outer in zip(placeholders, captures, strict=True):
        if placeholder.users:
            kept.append(outer)
        else:
            graph.erase_node(placeholder)
    return tuple(kept)


@add_hop_context
class AttentionBackwardVariable(TorchHigherOrderOperatorVariable):
    """The backward op, which compiled autograd shows to Dynamo with its graphs already traced."""

    _HOP_NAME = "flex_inductor.op.attention_backward"

    def _call_function(self, tx, args, kwargs):
        proxies = tuple(self._to_proxy(tx, arg) for arg in args)
        proxy = tx.output.create_proxy("call_function", self.value, args=proxies, kwargs={})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _to_proxy(self, tx, arg) -> Any:
        if isinstance(arg, (ListVariable, TupleVariable)):
            return arg.python_type()(self._to_proxy(tx, item) for item in arg.items)
        if isinstance(module := getattr(arg, "value", None), torch.nn.Module):
            known = (name for name, other in tx.output.nn_modules.items() if other is module)
            name = next(known, None) or tx.output.install_subgraph("graph", module)
            node = make_attr(tx, name)
            node.node.meta["example_value"] = module
            return node
        return arg.as_proxy()


compat.register_dynamo_variable(attention, AttentionVariable)
compat.register_dynamo_variable(attention_backward, AttentionBackwardVariable)
