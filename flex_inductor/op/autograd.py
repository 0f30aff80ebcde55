"""Derivatives of the ops: autograd, torch.func's transforms, and autocast, which comes before both."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.autograd.forward_ad import unpack_dual

from .. import errors
from .hop import AttentionCall, BackwardCall, attention, attention_backward, prepare, with_score_graph
from .tracing import random_op, trace_joint
from .vmap import fold_backward, fold_forward

_SAVED = object()  # where a saved tensor of the schedule goes


class _AttentionFunction(torch.autograd.Function):
    """Ties the two ops together for autograd and functorch."""

    @staticmethod
    def forward(query, key, value, call, joint, *score_captures):
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*call._replace(query=query, key=key, value=value, score_captures=score_captures))

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, call, joint, *score_captures = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query,
            key,
            value,
            out,
            lse,
            *score_captures,
            *call.mask_captures,
            *(field for field in call.schedule if isinstance(field, Tensor)),
        )
        ctx.counts = (len(score_captures), len(call.mask_captures))
        schedule = tuple(_SAVED if isinstance(field, Tensor) else field for field in call.schedule)
        ctx.call = _without_inputs(call)._replace(mask_captures=(), schedule=schedule)
        ctx.joint = joint

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _grad_max):
        if grad_out is None and grad_lse is None:
            return (None,) * (5 + ctx.counts[0])
        query, key, value, out, lse, *rest = ctx.saved_tensors
        scores, masks = ctx.counts
        saved = iter(rest[scores + masks :])
        schedule = tuple(next(saved) if field is _SAVED else field for field in ctx.call.schedule)
        wants = "".join(name for name, needed in zip("qkv", ctx.needs_input_grad, strict=False) if needed)
        call = ctx.call
        d_query, d_key, d_value, d_captures = attention_backward(
            query, key, value, out, lse, grad_out, grad_lse,
            schedule, call.score_mod, ctx.joint, call.mask_mod, call.scale, {**call.options, "wants": wants},
            tuple(rest[:scores]), tuple(rest[scores : scores + masks]),
        )  # fmt: skip
        return d_query, d_key, d_value, None, None, *d_captures

    @staticmethod
    def jvp(ctx, *_tangents):
        raise errors.second_derivative()  # forward mode over reverse mode, as in torch.func.hessian

    @staticmethod
    def vmap(info, in_dims, query, key, value, call, joint, *score_captures):
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
    """Run the op under autograd; `wanted` says whether the score and each capture of score_mod may need one."""
    joint = None
    if call.score_mod is not None:
        checked = with_score_graph(call)
        joint = trace_joint(call.score_mod, call.query, call.score_captures, wanted)
        if drawn := random_op(joint):  # also in the backward of a Function
            raise errors.mod_is_random("score_mod", drawn)
        call = checked
    return _AttentionFunction.apply(
        call.query, call.key, call.value, _without_inputs(call), joint, *call.score_captures
    )


@attention.py_impl(DispatchKey.Autograd)
def _autograd(*args):
    call = prepare(AttentionCall(*args))
    inputs = (call.query, call.key, call.value, *call.score_captures)
    if any(unpack_dual(t).tangent is not None for t in inputs):
        raise errors.forward_mode_derivative()
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        wants_score = call.query.requires_grad or call.key.requires_grad
        return _differentiable(call, [wants_score, *(c.requires_grad for c in call.score_captures)])
    call = with_score_graph(call)
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
    def jvp(ctx, *_tangents):
        raise errors.second_derivative()

    @staticmethod
    def vmap(info, in_dims, *args):
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


@attention.py_impl(TransformType.Grad)
@attention.py_impl(TransformType.Vmap)
def _transform(interpreter, *args):
    call = prepare(AttentionCall(*args))
    # Which level wants which gradient is not known here: every floating capture may need one.
    return _differentiable(call, [True, *(c.dtype.is_floating_point for c in call.score_captures)])


@attention_backward.py_impl(TransformType.Grad)
@attention_backward.py_impl(TransformType.Vmap)
def _backward_transform(interpreter, *args):
    return _backward_op(*args)


@attention.py_impl(TransformType.Jvp)
@attention_backward.py_impl(TransformType.Jvp)
def _no_forward_mode(interpreter, *args):
    raise errors.forward_mode_derivative()


def _autocast(device_type: str, *args):
    call = AttentionCall(*args)
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (call.query, call.key, call.value)
    )
    keys = torch._C.DispatchKeySet(DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        DispatchKey.AutocastCUDA
    )
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return attention(*call._replace(query=q, key=k, value=v))


attention.py_impl(DispatchKey.AutocastCPU)(functools.partial(_autocast, "cpu"))
attention.py_impl(DispatchKey.AutocastCUDA)(functools.partial(_autocast, "cuda"))
