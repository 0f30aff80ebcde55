"""How Dynamo traces a call of the ops: both mods become subgraphs, what they capture becomes inputs.

Imported only once Dynamo itself is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import trace_rules
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.variables import functions
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import (
    FlexAttentionHigherOrderVariable,
    TorchHigherOrderOperatorVariable,
    add_hop_context,
    discard_graph_changes,
    make_attr,
    speculate_subgraph,
)
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._ops import HigherOrderOperator

from .. import compat, errors
from .hop import CAPTURE_NAME, attention, attention_backward, check_ops, readable_name
from .lift import names_in
from .tracing import (
    INDEX_DTYPE,
    MASK_LANES,
    SCORE_LANES,
    LaneIndexing,
    score_dtype,
    trace_mod,
)


@add_hop_context
class AttentionVariable(TorchHigherOrderOperatorVariable):
    """The forward op: `score_mod` and `mask_mod` are traced, everything else is passed on."""

    _HOP_NAME = "flex_inductor.op.attention"

    def _call_function(self, tx, args, kwargs):
        query, key, value, schedule, score_mod, mask_mod, scale, options = args[:8]
        # A graph that was traced before has its captures among the arguments already.
        given_score, given_mask = (captures.items for captures in args[8:]) if args[8:] else ((), ())
        score, score_captures = self._subgraph(
            tx, query, key, score_mod, "score_mod", SCORE_LANES, given_score
        )
        mask, mask_captures = self._subgraph(tx, query, key, mask_mod, "mask_mod", MASK_LANES, given_mask)
        lists = _with_static_block_sizes(tx, schedule)
        call = (
            *(arg.as_proxy() for arg in (query, key, value, lists)),
            score,
            mask,
            float_to_tensor(tx, query, scale.as_proxy(), score_dtype(_example_of(query).dtype)),
            options.as_proxy(),
            score_captures,
            mask_captures,
        )
        proxy = tx.output.create_proxy("call_function", self.value, args=call, kwargs={})
        try:
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)
        except Exception as error:
            if ours := errors.own_error_in(error):
                self._refuse(str(ours))
            raise

    def _subgraph(self, tx, query, key, mod, name, lanes, given) -> tuple[Any, tuple]:
        if mod.is_python_constant() and mod.as_python_constant() is None:
            return None, ()
        function = _python_function(mod)
        if function is not None:
            self._check(errors.check_arity, name, function, lanes)
        lane_args = self._lane_args(tx, query, key, lanes)
        try:
            with LaneIndexing(), self._functions_kept(name):
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
        self._check(errors.check_mod_result, name, _example_of(result))
        outer = [*(capture.as_proxy() for capture in given), *lifted]
        names = [_name_of(capture, mod, function) for capture in outer]
        module = fx.GraphModule(tx.output.nn_modules, graph)
        self._check(_check_captures, name, module, names, _example_of(query))
        for placeholder, capture in zip(graph.find_nodes(op="placeholder")[len(lanes) :], names, strict=True):
            placeholder.meta[CAPTURE_NAME] = capture
        outer += _lift_lengths(tx, graph, outer, len(lanes))
        floats = score_dtype(_example_of(query).dtype)
        captures = tuple(
            float_to_tensor(tx, query, c, floats) for c in _drop_unused(graph, outer, len(lanes))
        )
        for placeholder in graph.find_nodes(op="placeholder"):
            # Dynamo would ask a vmapped tensor for its symbolic sizes, which torch cannot tell.
            example = placeholder.meta["example_value"]
            if isinstance(example, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(example):
                del placeholder.meta["example_value"]
        module = fx.GraphModule(tx.output.nn_modules, graph)
        return make_attr(tx, tx.output.install_subgraph(name, module)), captures

    def _lane_args(self, tx, query, key, lanes) -> list:
        """Lanes as Dynamo's tensors. It keeps an autograd.Function only where an argument requires grad."""
        build = compat.dynamo_constant
        floats = score_dtype(_example_of(query).dtype)
        needs_grad = any(tensor.requires_grad is not False for tensor in (query, key))

        def lane(name: str) -> Any:
            dtype = floats if name == "score" else INDEX_DTYPE
            given = {"dtype": dtype, "requires_grad": needs_grad and name == "score"}
            return query.call_method(
                tx, "new_zeros", [build(tx, [])], {k: build(tx, v) for k, v in given.items()}
            )

        with discard_graph_changes(tx):
            return [lane(name) for name in lanes]

    def _functions_kept(self, name) -> Any:
        """Inside torch.func's transforms Dynamo takes an autograd.Function's forward alone: that is refused."""
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if name == "mask_mod" or not in_transform or not torch.is_grad_enabled():
            return contextlib.nullcontext()

        def refuse(function, *_):
            # A graph break would not do: what Dynamo makes of one inside a transform fails without saying why.
            error = errors.function_in_compiled_transform(name, function.fn_cls.__name__)
            raise compat.handed_on(error, inspect.currentframe())

        return unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", refuse)

    def _check(self, check, *args) -> None:
        try:
            check(*args)
        except errors.FlexError as error:
            self._refuse(str(error))

    def _refuse(self, message: str) -> None:
        """A graph break: eager then raises the same message, or Dynamo does where breaks are not allowed."""
        unimplemented(
            gb_type="flex_attention refused the call",
            context=message,
            explanation=message,
            hints=[],
        )


def _python_function(variable: Any) -> Any:
    """The callable that Dynamo's variable stands for, or one of the same signature; None if unknown."""
    if isinstance(variable, functions.FunctoolsPartialVariable):
        inner = _python_function(variable.func)
        given = dict.fromkeys(variable.keywords)
        return inner and functools.partial(inner, *(None for _ in variable.args), **given)
    if isinstance(variable, functions.UserMethodVariable):
        return types.MethodType(variable.fn, getattr(variable.obj, "value", variable))
    if isinstance(variable, functions.NestedUserFunctionVariable):
        code = variable.get_code()
        closure = tuple(types.CellType(None) for _ in code.co_freevars)
        defaults = tuple(None for _ in variable.defaults.items) if variable.defaults else None  # type: ignore[attr-defined]
        return types.FunctionType(code, {}, code.co_name, defaults, closure)
    return getattr(variable, "fn", None)


def _name_of(capture: fx.Proxy, mod: Any, function: Any) -> str:
    """What the author of `mod` calls a captured tensor."""
    for name, argument in getattr(mod, "keywords", {}).items():
        if argument.is_proxy() and argument.as_proxy().node is capture.node:
            return name
    known = dict(names_in(function)) if function is not None else {}
    grapharg = capture.node.meta.get("grapharg")
    if grapharg is None:
        return readable_name(capture.node.name)
    return known.get(id(grapharg.example)) or readable_name(capture.node.name)


def _check_captures(name: str, mod: fx.GraphModule, names: Sequence[str], query: Tensor) -> None:
    placeholders = mod.graph.find_nodes(op="placeholder")
    lanes = len(placeholders) - len(names)
    examples = [placeholder.meta["example_value"] for placeholder in placeholders[lanes:]]
    for example, capture in zip(examples, names, strict=True):
        if isinstance(example, Tensor) and example.device != query.device:
            raise errors.capture_on_other_device(name, capture, example.device, query.device)
        if name == "mask_mod" and isinstance(example, Tensor) and example.requires_grad:
            raise errors.mask_capture_needs_grad(capture)
    if any(_may_write(node) for node in mod.graph.nodes):
        lane_names = SCORE_LANES if name == "score_mod" else MASK_LANES
        tensors = [e if isinstance(e, Tensor) else query.new_zeros(()) for e in examples]
        check_ops(trace_mod(mod, lane_names, query, tensors), name, [*lane_names, *names])


def _may_write(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):  # of graphs of its own
        return True
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    name = getattr(node.target, "__name__", "")
    in_place = name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv") or name.endswith("_")
    return node.op == "call_function" and (in_place or "out" in node.kwargs)


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


def float_to_tensor(tx: Any, like: Any, value: Any, dtype: torch.dtype) -> Any:
    """A Python float that changes from call to call, as a 0-d tensor.

    Multiplying a tensor is what keeps Dynamo from making a constant of it, and compiling for each value.
    """
    if not isinstance(value, fx.Proxy) or not isinstance(value.node.meta["example_value"], torch.SymFloat):
        return value
    one = like.call_method(
        tx, "new_ones", [compat.dynamo_constant(tx, [])], {"dtype": compat.dynamo_constant(tx, dtype)}
    )
    product = tx.output.create_proxy("call_function", operator.mul, (one.as_proxy(), value), {})
    return wrap_fx_proxy(tx=tx, proxy=product).as_proxy()


def _lift_lengths(tx: Any, graph: fx.Graph, captures: Sequence[Any], lanes: int) -> list[fx.Proxy]:
    """Where a mod only reads dynamic sizes of a tensor, such as q.shape[2], the numbers are the captures."""
    graph.eliminate_dead_code()  # Dynamo asks for every size where the mod uses one
    placeholders = graph.find_nodes(op="placeholder")
    first_operation = next(node for node in graph.nodes if node.op != "placeholder")
    lengths = []
    for placeholder, capture in zip(placeholders[lanes:], captures, strict=True):
        for read, dim in _size_reads(placeholder):
            length = tx.output.create_proxy("call_function", torch.ops.aten.sym_size.int, (capture, dim), {})
            with graph.inserting_before(first_operation):
                inner = graph.placeholder(f"{placeholder.name}_size_{dim}")
            length.node.meta["example_value"] = inner.meta["example_value"] = read.meta["example_value"]
            read.replace_all_uses_with(inner)
            lengths.append(length)
    graph.eliminate_dead_code()
    for placeholder in placeholders[lanes:]:
        for user in list(placeholder.users):
            if user.target == "size" and not user.users:
                graph.erase_node(user)
    return lengths


def _size_reads(placeholder: fx.Node) -> list[tuple[fx.Node, int]]:
    """(node, dim) for each size that is read, if nothing else of the tensor is and each is a number to reckon with."""
    reads = []
    for user in placeholder.users:
        if user.target not in ("size", torch.ops.aten.sym_size.int):
            return []
        if len(user.args) == 2:
            reads.append((user, user.args[1]))
        else:
            reads += [(item, item.args[1]) for item in user.users]
    return reads if all(isinstance(dim, int) and _is_operand(read) for read, dim in reads) else []


def _is_operand(size: fx.Node) -> bool:
    """Whether a size only goes into scalar arithmetic: no shape, slice or range is made of it."""
    for user in size.users:
        example = user.meta.get("example_value")
        is_scalar = isinstance(example, Tensor) and example.dim() == 0 and user.target is not operator.getitem
        if not is_scalar and not (isinstance(example, (torch.SymInt, torch.SymFloat)) and _is_operand(user)):
            return False
    return True


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


@add_hop_context
class TorchAttentionVariable(FlexAttentionHigherOrderVariable):
    """Torch's own op: it keeps the Functions on a score if query requires grad, and ours if key does as well."""

    def _call_function(self, tx, args, kwargs):
        query, key, *_ = args
        known = query.requires_grad
        if known is False:
            query.requires_grad = key.requires_grad
        try:
            return super()._call_function(tx, args, kwargs)
        finally:
            query.requires_grad = known


trace_rules.add(__package__)  # after a graph break the op runs as it is
compat.register_dynamo_variable(attention, AttentionVariable)
compat.register_dynamo_variable(attention_backward, AttentionBackwardVariable)
compat.register_dynamo_variable(torch.ops.higher_order.flex_attention, TorchAttentionVariable)
