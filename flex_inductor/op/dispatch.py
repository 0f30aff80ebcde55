"""The ops in eager mode, and under tracers, fake tensors, functionalization and checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._higher_order_ops.utils import redirect_to_mode, reenter_make_fx, register_fake
from torch._ops import HigherOrderOperator
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    set_original_aten_op,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ..mod_ir import errors
from ..mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES, example_lanes
from ..mod_ir.checks import mark_checked, random_op
from ..mod_ir.indexing import LaneIndexing
from ..mod_ir.split import programs
from . import ring
from .call import AttentionCall, BackwardCall, check_served, is_guarded, wanted_gradients
from .eager import chunked, kernels
from .hop import attention, attention_backward
from .prepare import prepare, with_score_graph


@attention.py_impl(DispatchKey.CompositeExplicitAutograd)
@torch.no_grad()
def _eager(*args):
    # In inference mode stand-ins are kept until here.
    call = with_score_graph(prepare(AttentionCall.read(*args))).with_inputs(stand_ins=())
    if call.inputs.ring is not None:
        return ring.computed_by["forward"](call.inputs.ring, call)
    check_served(call.inputs, chunked.SERVES)

    def in_chunks() -> Any:
        mods = programs(call.score_mod, call.mask_mod, guarded=is_guarded(call.mask_mod, call.inputs))
        scale, more = float(call.scale), call.options.more
        return chunked.forward(call.query, call.key, call.value, call.inputs, mods, scale, more)

    return kernels.run(call, in_chunks)


@attention_backward.py_impl(DispatchKey.CompositeExplicitAutograd)
@torch.no_grad()
def _eager_backward(*args):
    call = BackwardCall.read(*args)
    if call.inputs.ring is not None:
        return ring.computed_by["backward"](call.inputs.ring, call)
    check_served(call.inputs, chunked.SERVES)

    def in_chunks() -> Any:
        guarded = is_guarded(call.mask_mod, call.inputs)
        return chunked.backward(
            call.query, call.key, call.value, call.out, call.lse, call.grad_out, call.grad_lse, call.inputs,
            programs(call.score_mod, call.mask_mod, call.joint, guarded=guarded), call.scale, call.wants,
        )  # fmt: skip

    return kernels.run(call, in_chunks)


def _functionalize(op: HigherOrderOperator, ctx, *args):
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(op(*ctx.unwrap_tensors(args)))


@register_fake(attention)
def _fake(*args):
    call = AttentionCall.read(*args)
    return chunked.empty_outputs(call.query, call.value, call.inputs.partial, call.options.more)


@register_fake(attention_backward)
def _fake_backward(*args):
    call = BackwardCall.read(*args)
    wanted = wanted_gradients(call.joint, len(call.inputs.score_captures))
    return chunked.empty_gradients(call[:3], call.inputs, call.wants, wanted)


def _keeping_lines(mod: Callable) -> Callable:
    """`mod`, so that make_fx, which is under way, knows the line of the user's code that each node comes from."""
    if not isinstance(mod, fx.GraphModule):
        return mod

    def run(*args: Any) -> Any:
        with traceback.preserve_node_meta():
            return fx.Interpreter(mod).run(*args)

    return run


def _readable_again(traced: fx.GraphModule) -> fx.GraphModule:
    """With zeros that torch's caches can read: not `full`, where sizes change."""
    aten, graph = torch.ops.aten, traced.graph
    for node in graph.find_nodes(op="call_function", target=aten.full.default):
        sizes, value = node.args
        if value == 0 and any(isinstance(size, fx.Node) for size in sizes):
            node.target, node.args = aten.new_zeros.default, (graph.find_nodes(op="placeholder")[0], sizes)
    traced.recompile()
    return traced


_GRAPH_FIELDS = {"score_mod": SCORE_LANES, "joint": JOINT_LANES, "mask_mod": MASK_LANES}


def _proxy(op: HigherOrderOperator, layout: Any, mode: ProxyTorchDispatchMode, *args):
    call = layout.read(*args)
    example = op(*call)
    graphs: dict[str, Any] = {}
    for field, lanes in _GRAPH_FIELDS.items():
        mod = getattr(call, field, None)
        if mod is None:
            continue
        captures = call.inputs.mask_captures if field == "mask_mod" else call.inputs.score_captures
        alone = isinstance(mod, fx.GraphModule) and not captures  # layers share what is made of it
        alike = vars(mode.tracer).setdefault("flex_inductor_graphs", {}) if alone else {}
        kind = (mod if alone else None, lanes, call.query.dtype, call.query.device)
        if kind not in alike:
            with disable_proxy_modes_tracing():
                examples = example_lanes(call.query, lanes)
            with LaneIndexing():
                graph = _readable_again(reenter_make_fx(_keeping_lines(mod))(*examples, *captures))
            if drawn := random_op(graph):  # in inference mode nothing has checked yet
                raise errors.mod_is_random(field, drawn)
            mode.tracer.root.register_module(mode.tracer.get_fresh_qualname(field), graph)
            alike[kind] = mark_checked(graph)
        graphs[field] = alike[kind]
    traced = call._replace(**graphs)
    proxies = tree_map(mode.tracer.unwrap_proxy, traced.wire())
    with set_original_aten_op(op):
        proxy = mode.tracer.create_proxy("call_function", op, proxies, {})
    return track_tensor_tree(example, proxy, constant=None, tracer=mode.tracer)


def _negated(op: HigherOrderOperator, *args):
    """For views whose values are negated on reading."""
    return op(*tree_map_only(Tensor, Tensor.resolve_neg, args))


for _op, _layout in zip((attention, attention_backward), (AttentionCall, BackwardCall), strict=True):
    _op.py_impl(DispatchKey.Negative)(functools.partial(_negated, _op))
    _op.py_functionalize_impl(functools.partial(_functionalize, _op))
    _op.py_impl(ProxyTorchDispatchMode)(functools.partial(_proxy, _op, _layout))

redirect_to_mode(attention, _CachingTorchDispatchMode)
redirect_to_mode(attention, _CachedTorchDispatchMode)
