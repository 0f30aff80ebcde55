"""How Dynamo traces a call of the ops: both mods become subgraphs, their captures become inputs.

Imported only once Dynamo itself is.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import trace_rules
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import (
    FlexAttentionHigherOrderVariable,
    TorchHigherOrderOperatorVariable,
    add_hop_context,
    make_attr,
    speculate_subgraph,
)
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ... import compat, errors
from ...mod_ir import errors as mod_errors
from ...mod_ir.arguments import INDEX_DTYPE, MASK_LANES, SCORE_LANES, score_dtype
from ...mod_ir.capture import names_in
from ...mod_ir.checks import check_ops
from ...mod_ir.indexing import LaneIndexing
from ...mod_ir.names import CAPTURE_NAME, readable_name
from ...mod_ir.source_lines import last_line, line_raising
from ...mod_ir.trace import trace_value
from ...options import CallOptions
from ..autograd import has_tangent, only_shapes
from ..call import AttentionCall, Inputs, read_options
from ..hop import attention, attention_backward
from . import untraced  # noqa: F401 - its variable registers itself
from .known import example_of, python_function
from .nodes import may_write, only_computes
from .numbers import (
    as_lane_tensor,
    changing_numbers,
    float_to_tensor,
    number_of_a_lane,
    numbers_outside,
    tensor_sized_by_values,
)
from .refusals import check, refuse


@add_hop_context
class AttentionVariable(TorchHigherOrderOperatorVariable):
    """The forward op: `score_mod` and `mask_mod` are traced, everything else is passed on."""

    _HOP_NAME = "flex_inductor.op.attention"

    def _call_function(self, tx, args, kwargs):
        with changing_numbers(tx), _assignments_kept(tx.output):
            return self._traced(tx, *args)

    def _traced(self, tx, query, key, value, score_mod, mask_mod, scale, inputs=None, options=None):
        given = Inputs() if inputs is None else Inputs.read(inputs.as_proxy())
        if given.schedule is not None:
            given = given._replace(schedule=_with_static_block_sizes(given.schedule))
        # A graph that was traced before has its captures among the arguments already.
        score_given, mask_given = (_captures(tx, inputs, name) for name in ("score", "mask"))
        score, score_captures = self._subgraph(
            tx, query, key, score_mod, "score_mod", SCORE_LANES, score_given
        )
        mask, mask_captures = self._subgraph(tx, query, key, mask_mod, "mask_mod", MASK_LANES, mask_given)
        call = AttentionCall(
            query.as_proxy(),
            key.as_proxy(),
            value.as_proxy(),
            score,
            mask,
            float_to_tensor(tx, query, scale.as_proxy(), score_dtype(example_of(query).dtype)),
            given._replace(score_captures=score_captures, mask_captures=mask_captures),
            CallOptions() if options is None else _with_static_hints(read_options(options.as_proxy())),
        )
        proxy = tx.output.create_proxy("call_function", self.value, args=call.wire(), kwargs={})
        graphs = [tx.output.nn_modules[mod.node.target].graph for mod in (score, mask) if mod is not None]
        known_good = given.sharded is None and all(map(only_computes, graphs))
        try:
            with only_shapes() if known_good else contextlib.nullcontext():
                outputs = wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)
        except Exception as error:
            if ours := errors.own_error_in(error):
                refuse(tx, ours)
            raise
        if has_tangent(proxy.node.meta["example_value"][0]) and not _in_transform():
            # Where the graph is traced again, levels are not known. A graph break would lose the tangent too.
            raise compat.out_of_dynamo(tx, errors.tangent_in_graph())
        return outputs

    def _subgraph(self, tx, query, key, mod, name, lanes, given) -> tuple[Any, tuple]:
        if mod.is_python_constant() and mod.as_python_constant() is None:
            return None, ()
        function = python_function(mod)
        if function is not None:
            check(tx, mod_errors.check_arity, name, function, lanes)
        lane_args = self._lane_args(tx, query, key, lanes)
        try:
            with LaneIndexing(), self._functions_kept(name), _no_hooks(name):
                (result, _), graph, lifted = speculate_subgraph(
                    tx,
                    mod,
                    [*lane_args, *given],
                    {},
                    description=f"flex_attention's {name}",
                    source_target=self.value,
                    set_subgraph_inputs="manual",
                    supports_input_mutation=True,  # our own checks name what a mod changes
                    supports_aliasing=True,
                )
        except TypeError as error:
            refuse(tx, mod_errors.cannot_be_called(name, lanes, error))
        except (Unsupported, UserError, GuardOnDataDependentSymNode) as error:
            if compat.needs_a_value(error):
                refuse(tx, mod_errors.needs_a_value(name, line_raising(error)))
            if "Unsafe side effect" in str(error):
                refuse(tx, mod_errors.assigns_outside(name, line_raising(error)))
            if "<class 'float'>" in str(error):  # the only number that no graph can return
                check(tx, mod_errors.check_mod_result, name, 0.0)
            raise
        except compat.runtime_errors_of_dynamo() as error:
            if any(
                text in str(error) for text in ("leaf Variable that requires grad", "functions with out=")
            ):
                refuse(tx, mod_errors.parameter_mutated(name, line_raising(error)))
            raise
        check(tx, _check_values, name, graph, len(lanes))
        check(tx, mod_errors.check_mod_result, name, example_of(result))
        outer = [*(capture.as_proxy() for capture in given), *lifted]
        names = [_name_of(capture, mod, function) for capture in outer]
        placeholders = graph.find_nodes(op="placeholder")[len(lanes) :]
        for placeholder, capture in zip(placeholders, names, strict=True):
            placeholder.meta[CAPTURE_NAME] = capture
        check(tx, _check_captures, name, graph, len(lanes), example_of(query))
        outer = numbers_outside(tx, example_of(query), graph, outer, len(lanes))
        check(tx, _check_writes, name, tx.output.nn_modules, graph, lanes, example_of(query))
        floats = score_dtype(example_of(query).dtype)
        captures = tuple(
            float_to_tensor(tx, query, c, floats) for c in _drop_unused(graph, outer, len(lanes))
        )
        for placeholder in graph.find_nodes(op="placeholder"):
            # Dynamo would ask a vmapped tensor for its symbolic sizes, which torch does not know.
            example = placeholder.meta["example_value"]
            if isinstance(example, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(example):
                del placeholder.meta["example_value"]
        return make_attr(tx, _installed(tx.output, name, graph, alone=not captures)), captures

    def _lane_args(self, tx, query, key, lanes) -> list:
        """Lanes as Dynamo's tensors. It keeps an autograd.Function only where an argument requires grad.

        A score that requires grad is no leaf, so that a mod may change it in place.
        """
        example: Tensor = example_of(query)
        needs_grad = any(tensor.requires_grad is not False for tensor in (query, key))
        apart = fx.Graph()  # the mod's graph gets placeholders of its own
        with tx.fake_mode:
            index = example.new_zeros((), dtype=INDEX_DTYPE)

        def lane(name: str) -> Any:
            value = index
            if name == "score":
                with tx.fake_mode, torch.enable_grad():
                    value = example.new_zeros((), dtype=score_dtype(example.dtype), requires_grad=needs_grad)
                    value = value.clone()
            node = apart.placeholder(name)
            node.meta["example_value"] = value
            return wrap_fx_proxy(tx=tx, proxy=fx.Proxy(node, tx.output.current_tracer), example_value=value)

        return [lane(name) for name in lanes]

    def _functions_kept(self, name) -> Any:
        """Inside torch.func's transforms Dynamo takes an autograd.Function's forward alone: that is refused."""
        if name == "mask_mod" or not _in_transform() or not torch.is_grad_enabled():
            return contextlib.nullcontext()

        def refuse_function(function, *_):
            # No graph break: inside a transform Dynamo's code for one fails without saying why.
            error = mod_errors.function_in_compiled_transform(name, function.fn_cls.__name__)
            raise compat.through_dynamo(error)

        return unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", refuse_function)


@contextlib.contextmanager
def _assignments_kept(output: Any) -> Iterator[None]:
    """Keep the object in which Dynamo notes what the function assigns.

    After a mod Dynamo goes on with a copy. Without this the next mod would see what an attribute was before.
    """
    known = output.side_effects
    try:
        yield
    finally:
        vars(known).update(vars(output.side_effects))
        output.side_effects = known


def _installed(output: Any, name: str, graph: fx.Graph, alone: bool) -> str:
    """The name under which Dynamo has the mod's graph. Layers share one that is `alone`, without captures."""
    if not alone:
        return output.install_subgraph(name, fx.GraphModule(output.nn_modules, graph))
    lanes = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    kinds = [isinstance(lane, Tensor) and (lane.dtype, lane.device, lane.requires_grad) for lane in lanes]
    same = (str(graph), kinds, [node.target for node in graph.nodes])
    for known, module in output.nn_modules.items():
        if getattr(module, "meta", {}).get(_SAME) == same:
            return known
    made = fx.GraphModule(output.nn_modules, graph)
    made.meta[_SAME] = same
    return output.install_subgraph(name, made)


_SAME = "flex_inductor.same"  # equal where graphs are


def _no_hooks(name: str) -> Any:
    """While Dynamo traces a mod: its graph would have no hook, and the gradient is another trace."""

    def refuse_hook(_tensor, tx, *_):
        refuse(tx, mod_errors.hook_in_mod(name))

    return unittest.mock.patch.object(TensorVariable, "_method_register_hook", refuse_hook)


def _in_transform() -> bool:
    """Whether one of torch.func's transforms is around."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _name_of(capture: fx.Proxy, mod: Any, function: Any) -> str:
    """What the author of `mod` calls a captured tensor."""
    for name, argument in getattr(mod, "keywords", {}).items():
        if argument.is_proxy() and argument.as_proxy().node is capture.node:
            return name
    known = dict(names_in(function)) if function is not None else {}
    grapharg = capture.node.meta.get("grapharg")
    if grapharg is None:
        return readable_name(capture.node.name)
    name, source = readable_name(capture.node.name), grapharg.source
    base = source.base if isinstance(source, AttrSource) else None
    if isinstance(base, GlobalSource) and base.global_name.startswith("__import_"):
        name = source.member  # a global of another file
    return known.get(id(grapharg.example)) or name


def _check_values(name: str, graph: fx.Graph, lanes: int) -> None:
    for node, error in (
        (number_of_a_lane(graph, lanes), mod_errors.needs_a_value),
        (tensor_sized_by_values(graph), mod_errors.size_from_values),
    ):
        if node is not None:
            raise error(name, last_line(node.meta.get("stack_trace") or ""))


def _check_captures(name: str, graph: fx.Graph, lanes: int, query: Tensor) -> None:
    for placeholder in graph.find_nodes(op="placeholder")[lanes:]:
        example, capture = placeholder.meta["example_value"], placeholder.meta[CAPTURE_NAME]
        if hasattr(example, "to_local"):  # without importing torch.distributed
            raise mod_errors.dtensor_in_compiled_mod(name)
        if isinstance(example, Tensor) and example.device != query.device:
            raise mod_errors.capture_on_other_device(name, capture, example.device, query.device)
        if name == "mask_mod" and isinstance(example, Tensor) and example.requires_grad:
            raise mod_errors.mask_capture_needs_grad(capture)


def _check_writes(name: str, modules: Any, graph: fx.Graph, lanes: Sequence[str], query: Tensor) -> None:
    if not any(map(may_write, graph.nodes)):
        return
    captures = graph.find_nodes(op="placeholder")[len(lanes) :]
    tensors = [as_lane_tensor(capture.meta["example_value"], query) for capture in captures]
    names = [*lanes, *(capture.meta.get(CAPTURE_NAME, capture.name) for capture in captures)]
    check_ops(trace_value(fx.GraphModule(modules, graph), lanes, query, tensors), name, names)


def _captures(tx: Any, inputs: Any, mod: str) -> list[Any]:
    """The captures that a call has already, as Dynamo's variables."""
    if inputs is None:
        return []
    field, constant = f"{mod}_captures", compat.dynamo_constant
    if hasattr(inputs, "tuple_cls"):
        return inputs.items[Inputs._fields.index(field)].items
    return inputs.call_method(tx, "get", [constant(tx, field), constant(tx, ())], {}).items


def _with_static_block_sizes(schedule: Any) -> Any:
    """Kernels are made for a block size, so it is not a symbol even where every integer may be."""
    return type(schedule)(*map(_static, schedule[:2]), *schedule[2:])


def _with_static_hints(options: CallOptions) -> CallOptions:
    """As for block sizes."""
    return options._replace(hints=tuple((name, _static(value)) for name, value in options.hints))


def _static(value: Any) -> Any:
    return int(value.node.meta["example_value"]) if isinstance(value, fx.Proxy) else value


def _drop_unused(graph: fx.Graph, captures: Sequence[Any], lanes: int) -> tuple:
    """Captures that the mod does not read after all, such as a query whose length it uses."""
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
            with _assignments_kept(tx.output):
                return super()._call_function(tx, args, kwargs)
        finally:
            query.requires_grad = known


for _name in ("op", "mod_ir", "upward", "lowerings"):
    trace_rules.add(f"flex_inductor.{_name}")  # after a graph break the op runs as it is
compat.register_dynamo_variable(attention, AttentionVariable)
compat.register_dynamo_variable(attention_backward, AttentionBackwardVariable)
compat.register_dynamo_variable(torch.ops.higher_order.flex_attention, TorchAttentionVariable)
