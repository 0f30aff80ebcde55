"""The two higher-order ops and the rules that torch's dispatcher, tracers and transforms ask for.

`attention` takes both mods as callables (FX graphs once Dynamo has traced them) and the tensors they
capture as inputs. `attention_backward` also takes the joint graph, which `tracing.trace_joint` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch._higher_order_ops.utils import redirect_to_mode, register_fake
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from .. import errors
from . import chunked
from .chunked_ops import wanted_gradients
from .layout import empty_like_layout
from .lift import LiftedMod, lift
from .program import split
from .schedule import BlockLists, BlockMap
from .tracing import (
    JOINT_LANES,
    MASK_LANES,
    SCORE_LANES,
    LaneIndexing,
    example_lanes,
    refuse_mutation,
    score_dtype,
    trace_joint,
    trace_mod,
)


class AttentionCall(NamedTuple):
    """The arguments of the forward op, in order."""

    query: Tensor  # [B, H, M, D]
    key: Tensor  # [B or 1, K, N, D], H a multiple of K
    value: Tensor  # [B or 1, K, N, V]
    schedule: tuple  # (), or the fields of schedule.BlockLists
    score_mod: Callable | None
    mask_mod: Callable | None
    scale: float | Tensor  # a 0-d tensor where it changes from call to call
    options: dict[str, Any]  # constants: kernel hints, which outputs are used, the build's hash
    score_captures: tuple = ()
    mask_captures: tuple = ()


class BackwardCall(NamedTuple):
    """The arguments of the backward op, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    schedule: tuple
    score_mod: Callable | None
    joint: Callable | None  # None where score_mod is
    mask_mod: Callable | None
    scale: float
    options: dict[str, Any]  # also "wants": which of "qkv" need a gradient
    score_captures: tuple = ()
    mask_captures: tuple = ()


class Attention(HigherOrderOperator):
    """(out, logsumexp, max_scores), the last two per row and in natural logarithm."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = AttentionCall(*args)
        return super().__call__(*_lift_captures(call))


class AttentionBackward(HigherOrderOperator):
    """(d query, d key, d value, (d capture, ...)), None for what needs none."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention_backward", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple]:
        return super().__call__(*BackwardCall(*args))


attention = Attention()
attention_backward = AttentionBackward()
_OPS = (attention, attention_backward)


def _lift_captures(call: AttentionCall) -> AttentionCall:
    """Calls from plain Python bring mods that still hold their captures."""
    for field, lanes in (("score", SCORE_LANES), ("mask", MASK_LANES)):
        mod, captures = getattr(call, f"{field}_mod"), getattr(call, f"{field}_captures")
        if mod is None or captures or isinstance(mod, (fx.GraphModule, LiftedMod, _Wrapped)):
            continue
        errors.check_arity(f"{field}_mod", mod, lanes)
        lifted, captures = lift(mod, lanes, call.query)
        call = call._replace(**{f"{field}_mod": lifted, f"{field}_captures": captures})
    return call


class _Wrapped:
    """A mod changed by a rule below, its captures already among the op's inputs."""

    def __init__(self, fn: Callable, names: Sequence[str] = ()):
        self.fn, self.names = fn, tuple(names)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def _capture_names(mod: Any, count: int) -> tuple[str, ...]:
    if isinstance(mod, fx.GraphModule):
        names = [node.name for node in mod.graph.nodes if node.op == "placeholder"]
        return tuple(names[len(names) - count :])
    return getattr(mod, "names", ()) or tuple(f"capture_{i}" for i in range(count))


def lane_graph(mod: Callable, field: str, query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    """`mod` as an FX graph of aten ops, checked: what it returns, and that it mutates nothing."""
    if isinstance(mod, fx.GraphModule) and mod.meta.get(_CHECKED):
        return mod
    lanes = SCORE_LANES if field == "score_mod" else MASK_LANES
    graph = trace_mod(mod, lanes, query, captures)
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    errors.check_mod_result(field, output.meta["val"] if isinstance(output, fx.Node) else output)
    refuse_mutation(field, graph, _capture_names(mod, len(captures)), len(lanes))
    graph.meta[_CHECKED] = True
    return graph


_CHECKED = "flex_inductor_lane_graph"


# ---- Autograd -------------------------------------------------------------------------------------


def _number_to_tensor(capture: Any, query: Tensor) -> Any:
    """A Python number that Dynamo lifted, because it changes from call to call, becomes a 0-d tensor."""
    if isinstance(capture, (float, torch.SymFloat)):
        return torch.scalar_tensor(capture, dtype=score_dtype(query.dtype), device=query.device)
    if isinstance(capture, (int, torch.SymInt)):
        return torch.scalar_tensor(capture, dtype=torch.int64, device=query.device)
    return capture


def _prepare(call: AttentionCall) -> AttentionCall:
    """Numbers become tensors, a scale that changes from call to call a capture; both mods are checked."""
    call = call._replace(
        score_captures=tuple(_number_to_tensor(c, call.query) for c in call.score_captures),
        mask_captures=tuple(_number_to_tensor(c, call.query) for c in call.mask_captures),
    )
    if isinstance(call.scale, (torch.SymFloat, Tensor)):
        call = _scale_as_capture(call)
    for capture, name in zip(call.mask_captures, _capture_names(call.mask_mod, len(call.mask_captures)), strict=True):
        if capture.requires_grad:
            raise errors.mask_capture_needs_grad(name)
    if call.mask_mod is not None:
        call = call._replace(mask_mod=lane_graph(call.mask_mod, "mask_mod", call.query, call.mask_captures))
    return call


def _scale_as_capture(call: AttentionCall) -> AttentionCall:
    inner = call.score_mod
    scale = _number_to_tensor(call.scale, call.query)

    def scaled(score, b, h, q_idx, kv_idx, scale, *captures):
        score = score * scale
        return score if inner is None else inner(score, b, h, q_idx, kv_idx, *captures)

    names = ("scale", *_capture_names(inner, len(call.score_captures)))
    return call._replace(score_mod=_Wrapped(scaled, names), scale=1.0, score_captures=(scale, *call.score_captures))


class _AttentionFunction(torch.autograd.Function):
    """Ties the two ops together for autograd and functorch."""

    @staticmethod
    def forward(query, key, value, call, joint, *score_captures):  # noqa: ARG004
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*call._replace(query=query, key=key, value=value, score_captures=score_captures))

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, call, joint, *score_captures = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        lists = call.schedule[2:]
        ctx.listed = [tensor is not None for tensor in lists]
        ctx.save_for_backward(
            query, key, value, out, lse, *score_captures, *call.mask_captures, *(t for t in lists if t is not None)
        )
        ctx.counts = (len(score_captures), len(call.mask_captures))
        ctx.call = call._replace(
            query=None, key=None, value=None, score_captures=(), mask_captures=(), schedule=call.schedule[:2]
        )
        ctx.joint = joint

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _grad_max):
        if grad_out is None and grad_lse is None:
            return (None,) * (5 + ctx.counts[0])
        query, key, value, out, lse, *rest = ctx.saved_tensors
        scores, masks = ctx.counts
        lists = iter(rest[scores + masks :])
        schedule = (*ctx.call.schedule, *(next(lists) if present else None for present in ctx.listed))
        wants = "".join(name for name, needed in zip("qkv", ctx.needs_input_grad, strict=False) if needed)
        call = ctx.call
        d_query, d_key, d_value, d_captures = attention_backward(
            query, key, value, out, lse, grad_out, grad_lse,
            schedule, call.score_mod, ctx.joint, call.mask_mod, call.scale, {**call.options, "wants": wants},
            tuple(rest[:scores]), tuple(rest[scores : scores + masks]),
        )  # fmt: skip
        return d_query, d_key, d_value, None, None, *d_captures

    @staticmethod
    def vmap(info, in_dims, query, key, value, call, joint, *score_captures):
        from .vmap import fold_forward

        q_dim, k_dim, v_dim, call_dims, _, *capture_dims = in_dims
        call = call._replace(query=query, key=key, value=value, score_captures=tuple(score_captures))
        dims = call_dims._replace(query=q_dim, key=k_dim, value=v_dim, score_captures=tuple(capture_dims))
        folded, joint, unfold = fold_forward(call, joint, dims, info.batch_size)
        outputs = _AttentionFunction.apply(
            folded.query, folded.key, folded.value, _without_inputs(folded), joint, *folded.score_captures
        )
        return tuple(unfold(output) for output in outputs), (0, 0, 0)


def _without_inputs(call: AttentionCall) -> AttentionCall:
    return call._replace(query=None, key=None, value=None, score_captures=())


def _differentiable(call: AttentionCall, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op under autograd; `wanted` says which captures of score_mod may need a gradient."""
    joint = None
    if call.score_mod is not None:
        joint = trace_joint(call.score_mod, call.query, call.score_captures, wanted)
        graph = lane_graph(call.score_mod, "score_mod", call.query, call.score_captures)
        call = call._replace(score_mod=graph)
    return _AttentionFunction.apply(
        call.query, call.key, call.value, _without_inputs(call), joint, *call.score_captures
    )


@attention.py_impl(DispatchKey.Autograd)
def _autograd(*args):
    call = _prepare(AttentionCall(*args))
    inputs = (call.query, call.key, call.value, *call.score_captures)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _differentiable(call, [capture.requires_grad for capture in call.score_captures])
    if call.score_mod is not None:
        graph = lane_graph(call.score_mod, "score_mod", call.query, call.score_captures)
        call = call._replace(score_mod=graph)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*call)


class _BackwardFunction(torch.autograd.Function):
    """The backward op under transforms; its own derivative is refused by name."""

    @staticmethod
    def forward(*args):
        with torch._C._AutoDispatchBelowAutograd():
            *grads, captured = attention_backward(*args)
        return (*grads, *captured)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_grads):
        raise errors.second_derivative()

    @staticmethod
    def vmap(info, in_dims, *args):
        from .vmap import fold_backward

        folded, unfold = fold_backward(BackwardCall(*args), BackwardCall(*in_dims), info.batch_size)
        grads = unfold(_backward_op(*folded))
        return grads, tuple(None if grad is None else 0 for grad in grads)


def _backward_op(*args):
    grads = custom_function_call(_BackwardFunction, *args)
    return grads[0], grads[1], grads[2], tuple(grads[3:])


@attention_backward.py_impl(DispatchKey.Autograd)
def _backward_autograd(*args):
    call = BackwardCall(*args)
    inputs = (call.query, call.key, call.value, call.out, call.lse, call.grad_out, call.grad_lse)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _backward_op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward(*args)


# ---- functorch transforms -------------------------------------------------------------------------


@attention.py_impl(TransformType.Grad)
@attention.py_impl(TransformType.Vmap)
def _transform(interpreter, *args):  # noqa: ARG001
    call = _prepare(AttentionCall(*args))
    # Which level wants which gradient is not known here: every floating capture may need one.
    return _differentiable(call, [c.dtype.is_floating_point for c in call.score_captures])


@attention_backward.py_impl(TransformType.Grad)
@attention_backward.py_impl(TransformType.Vmap)
def _backward_transform(interpreter, *args):  # noqa: ARG001
    return _backward_op(*args)


@attention.py_impl(TransformType.Jvp)
@attention_backward.py_impl(TransformType.Jvp)
def _no_forward_mode(interpreter, *args):  # noqa: ARG001
    raise errors.forward_mode_derivative()


# ---- Autocast -------------------------------------------------------------------------------------


def _autocast(device_type: str, *args):
    call = AttentionCall(*args)
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (call.query, call.key, call.value)
    )
    keys = torch._C.DispatchKeySet(DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(DispatchKey.AutocastCUDA)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return attention(*call._replace(query=q, key=k, value=v))


attention.py_impl(DispatchKey.AutocastCPU)(functools.partial(_autocast, "cpu"))
attention.py_impl(DispatchKey.AutocastCUDA)(functools.partial(_autocast, "cuda"))


# ---- Functionalization, fake tensors, proxies, checkpointing --------------------------------------


def _functionalize(op: HigherOrderOperator, ctx, *args):
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(op(*ctx.unwrap_tensors(args)))


@register_fake(attention)
def _fake(*args):
    call = AttentionCall(*args)
    return chunked.empty_outputs(call.query, call.value)


@register_fake(attention_backward)
def _fake_backward(*args):
    call = BackwardCall(*args)
    grads = [
        empty_like_layout(tensor, tensor.shape) if name in call.options["wants"] else None
        for name, tensor in zip("qkv", (call.query, call.key, call.value), strict=True)
    ]
    captured = tuple(
        torch.empty(capture.shape, dtype=capture.dtype, device=capture.device) if wanted else None
        for capture, wanted in zip(call.score_captures, wanted_gradients(call.joint, len(call.score_captures)), strict=True)
    )
    return grads[0], grads[1], grads[2], captured


_GRAPH_FIELDS = {"score_mod": SCORE_LANES, "joint": JOINT_LANES, "mask_mod": MASK_LANES}


def _proxy(op: HigherOrderOperator, layout: type, mode: ProxyTorchDispatchMode, *args):
    from torch._higher_order_ops.utils import reenter_make_fx

    call = layout(*args)
    example = op(*call)
    graphs: dict[str, Any] = {}
    for field, lanes in _GRAPH_FIELDS.items():
        mod = getattr(call, field, None)
        if mod is None:
            continue
        captures = call.mask_captures if field == "mask_mod" else call.score_captures
        with disable_proxy_modes_tracing():
            lanes = example_lanes(call.query, lanes)
        with LaneIndexing():
            graph = reenter_make_fx(mod)(*lanes, *captures)
        graph.meta[_CHECKED] = True
        name = mode.tracer.get_fresh_qualname(field)
        mode.tracer.root.register_module(name, graph)
        graphs[field] = graph
    traced = call._replace(**graphs)
    proxies = torch.utils._pytree.tree_map(mode.tracer.unwrap_proxy, tuple(traced))
    with torch.fx.experimental.proxy_tensor.set_original_aten_op(op):
        proxy = mode.tracer.create_proxy("call_function", op, proxies, {})
    return track_tensor_tree(example, proxy, constant=None, tracer=mode.tracer)


for _op, _layout in zip(_OPS, (AttentionCall, BackwardCall), strict=True):
    _op.py_functionalize_impl(functools.partial(_functionalize, _op))
    _op.py_impl(ProxyTorchDispatchMode)(functools.partial(_proxy, _op, _layout))

redirect_to_mode(attention, _CachingTorchDispatchMode)
redirect_to_mode(attention, _CachedTorchDispatchMode)


# ---- Eager ----------------------------------------------------------------------------------------


def programs(call: AttentionCall | BackwardCall) -> chunked.Mods:
    """Both mods, ready for the chunked route."""
    guarded = call.mask_mod is not None or bool(call.schedule)
    score = mask = None
    if call.score_mod is not None:
        graph = lane_graph(call.score_mod, "score_mod", call.query, call.score_captures)
        score = split(graph, SCORE_LANES, guarded=guarded)
    if call.mask_mod is not None:
        graph = lane_graph(call.mask_mod, "mask_mod", call.query, call.mask_captures)
        mask = split(graph, MASK_LANES, guarded=False)
    return chunked.Mods(score, mask, call.score_captures, call.mask_captures)


def _block_map(schedule: tuple) -> BlockMap | None:
    lists = BlockLists.of(schedule)
    return None if lists is None else BlockMap(lists)


@attention.py_impl(DispatchKey.CompositeExplicitAutograd)
@torch.no_grad()
def _eager(*args):
    call = AttentionCall(*args)
    call = call if isinstance(call.mask_mod, fx.GraphModule | None) else _prepare(call)
    return chunked.forward(
        call.query, call.key, call.value, _block_map(call.schedule), programs(call), call.scale
    )


@attention_backward.py_impl(DispatchKey.CompositeExplicitAutograd)
@torch.no_grad()
def _eager_backward(*args):
    call = BackwardCall(*args)
    mods = programs(call)
    guarded = call.mask_mod is not None or bool(call.schedule)
    joint = None if call.joint is None else split(call.joint, JOINT_LANES, guarded=guarded)
    return chunked.backward(
        call.query, call.key, call.value, call.out, call.lse, call.grad_out, call.grad_lse,
        _block_map(call.schedule), mods, joint, call.scale, [name in call.options["wants"] for name in "qkv"],
    )  # fmt: skip
