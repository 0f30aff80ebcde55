"""Derivatives of the ops: autograd, torch.func's transforms, and autocast, which comes before both."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.autograd.forward_ad import unpack_dual
from torch.utils._pytree import tree_map

from .. import errors
from ..mod_ir.arguments import score_dtype
from ..mod_ir.checks import joint_graph
from ..softmax import gradient_of_sinks
from .call import QKV, AttentionCall, BackwardCall, filled, parts
from .hop import attention, attention_backward
from .prepare import as_its_graph, prepare, with_score_graph
from .vmap import fold_backward, fold_forward


class _AttentionFunction(torch.autograd.Function):
    """The two ops as one autograd.Function of the parts of a call."""

    @staticmethod
    def forward(call, joint, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*filled(call, tensors).with_inputs(stand_ins=()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, ctx.joint, *tensors = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _grad_max):
        out, lse, *tensors = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * (2 + len(tensors))
        call = filled(ctx.call, tensors)
        query, key, value, inputs = *call[:3], call.inputs
        needed = [*ctx.needs_input_grad[2:5]]
        if inputs.stand_ins:
            needed[1:] = [True, True]
        wants = tuple(name for name, need in zip(QKV, needed, strict=True) if need)
        wide = bool(inputs.stand_ins) and query.dtype != score_dtype(query.dtype)
        given = inputs._replace(stand_ins=(), sinks=None, partial=inputs.partial or wide)
        d_query, d_key, d_value, d_inputs = attention_backward(
            query, key, value, out, lse, grad_out, grad_lse,
            call.score_mod, ctx.joint, call.mask_mod, call.scale, wants, given, call.options,
        )  # fmt: skip
        if inputs.stand_ins:
            d_inputs, d_key, d_value = (*d_inputs, d_key, d_value), None, None
        if wide and d_query is not None:
            d_query = d_query.to(query.dtype)
        if inputs.sinks is not None:
            needs: Any = filled(ctx.call, ctx.needs_input_grad[2:]).inputs.sinks
            of_rows = (out, lse, grad_out, grad_lse)
            d_inputs = (*d_inputs, gradient_of_sinks(inputs.sinks, *of_rows) if needs else None)
        return None, None, d_query, d_key, d_value, *inputs.by_tensor(d_inputs)

    @staticmethod
    def jvp(ctx, *_tangents):
        raise errors.second_derivative()  # forward over reverse mode, as in torch.func.hessian

    @staticmethod
    def vmap(info, in_dims, call, joint, *tensors):
        dims = filled(call, in_dims[2:])
        folded, joint, unfold = fold_forward(filled(call, tensors), joint, dims, info.batch_size)
        return tuple(unfold(output) for output in _apply(folded, joint)), (0, 0, 0)


def _apply(call: AttentionCall, joint: Any) -> tuple[Tensor, Tensor, Tensor]:
    rest, tensors = parts(call)
    return _AttentionFunction.apply(rest, joint, *tensors)


def _differentiable(call: AttentionCall, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op under autograd; `wanted` says whether the score and each capture of score_mod may need one."""
    joint = None
    if call.score_mod is not None:
        checked, captures = with_score_graph(call), call.inputs.score_captures
        score_mod = as_its_graph(call.score_mod, checked.score_mod, captures)
        joint = joint_graph(score_mod, call.query, captures, wanted)
        call = checked
    return _apply(call, joint)


@attention.py_impl(DispatchKey.Autograd)
def _autograd(*args):
    call = prepare(AttentionCall.read(*args))
    inputs = (call.query, call.key, call.value, *call.inputs.differentiable)
    if any(unpack_dual(t).tangent is not None for t in inputs):
        raise errors.forward_mode_derivative()
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        wants_score = any(t.requires_grad for t in (call.query, call.key, *call.inputs.stand_ins))
        return _differentiable(call, [wants_score, *(c.requires_grad for c in call.inputs.score_captures)])
    call = with_score_graph(call).with_inputs(stand_ins=())
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
        # Texts name what a call has, so they stay.
        dims = tree_map(lambda arg, dim: arg if isinstance(arg, str) else dim, args, in_dims)
        folded, unfold = fold_backward(BackwardCall.read(*args), BackwardCall.read(*dims), info.batch_size)
        grads = unfold(_backward_op(*folded.wire()))
        return grads, tuple(None if grad is None else 0 for grad in grads)


def _backward_op(*args):
    grads = custom_function_call(_BackwardFunction, *args)
    return grads[0], grads[1], grads[2], tuple(grads[3:])


@attention_backward.py_impl(DispatchKey.Autograd)
def _backward_autograd(*args):
    call = BackwardCall.read(*args)
    inputs = (call.query, call.key, call.value, call.out, call.lse, call.grad_out, call.grad_lse)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _backward_op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward(*args)


@attention.py_impl(TransformType.Grad)
@attention.py_impl(TransformType.Vmap)
def _transform(interpreter, *args):
    call = prepare(AttentionCall.read(*args))
    # Nothing here says which level wants which gradient: every floating capture may need one.
    return _differentiable(call, [True, *(c.dtype.is_floating_point for c in call.inputs.score_captures)])


@attention_backward.py_impl(TransformType.Grad)
@attention_backward.py_impl(TransformType.Vmap)
def _backward_transform(interpreter, *args):
    return _backward_op(*args)


@attention.py_impl(TransformType.Jvp)
@attention_backward.py_impl(TransformType.Jvp)
def _no_forward_mode(interpreter, *args):
    raise errors.forward_mode_derivative()


def _autocast(device_type: str, *args):
    call = AttentionCall.read(*args)
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
