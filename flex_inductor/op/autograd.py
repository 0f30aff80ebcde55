"""Derivatives of the ops: autograd, torch.func's transforms, and autocast, which comes before both."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from .. import errors
from ..mod_ir.arguments import score_dtype
from ..mod_ir.capture import LiftedMod
from ..mod_ir.checks import joint_graph
from ..softmax import NARROW, gradient_of_sinks
from ..softmax.errors import derivative_of_entropy
from . import second
from .call import QKV, AttentionCall, BackwardCall, filled, parts, rows_of, tensors_of
from .eager import chunked
from .hop import attention, attention_backward
from .prepare import as_its_graph, prepare, with_score_graph
from .vmap import fold_forward


class _AttentionFunction(torch.autograd.Function):
    """The two ops as one autograd.Function of the parts of a call."""

    @staticmethod
    def forward(call, joint, source, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*filled(call, tensors).with_inputs(stand_ins=()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, ctx.joint, ctx.source, *tensors = inputs
        out, lse, *_ = output
        more = dict(zip(ctx.call.options.more, output[3:], strict=True))
        ctx.mark_non_differentiable(*_without_gradient(output, ctx.call.options.more))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, more.get("entropy"), *tensors)
        ctx.save_for_forward(out, lse, None, *tensors)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _grad_max, *grad_more):
        out, lse, entropy, *tensors = ctx.saved_tensors
        grad_entropy = dict(zip(ctx.call.options.more, grad_more, strict=True)).get("entropy")
        if grad_out is None and grad_lse is None and grad_entropy is None:
            return (None,) * (3 + len(tensors))
        call: AttentionCall = filled(ctx.call, tensors)
        query, key, value, inputs = *call[:3], call.inputs
        needed = [*ctx.needs_input_grad[3:6]]
        if inputs.stand_ins:
            needed[1:] = [True, True]
        wants = tuple(name for name, need in zip(QKV, needed, strict=True) if need)
        wide = bool(inputs.stand_ins) and query.dtype != score_dtype(query.dtype)
        given = inputs._replace(
            stand_ins=(), sinks=None, partial=inputs.partial or wide, grad_entropy=grad_entropy
        )
        scale: Any = call.scale
        # d entropy / d score is -weight * (log(weight) + entropy): kernels subtract weight * log(weight).
        of_lse = grad_lse if grad_entropy is None else _added(grad_lse, -entropy * grad_entropy)
        backward = BackwardCall(
            query, key, value, out, lse, grad_out, of_lse,
            call.score_mod, ctx.joint, call.mask_mod, scale, wants, given, call.options,
        )  # fmt: skip
        needs: Any = filled(ctx.call, ctx.needs_input_grad[3:]).inputs
        if not wants and not any(needs.score_captures):  # of the sinks alone
            d_query = d_key = d_value = None
            d_inputs: Any = (None,) * len(inputs.score_captures)
        elif _may_be_differentiated():
            if ctx.source.of_shards:
                raise errors.derivative_of_shards()
            d_query, d_key, d_value, d_inputs = second.backward(backward, ctx.source)
        else:
            d_query, d_key, d_value, d_inputs = attention_backward(*backward)
        if inputs.stand_ins:
            d_inputs, d_key, d_value = (*d_inputs, d_key, d_value), None, None
        if wide and d_query is not None:
            d_query = d_query.to(query.dtype)
        if inputs.sinks is not None:
            of_rows = out, lse, grad_out, of_lse, grad_entropy
            d_inputs = (*d_inputs, gradient_of_sinks(inputs.sinks, *of_rows) if needs.sinks else None)
        return None, None, None, d_query, d_key, d_value, *inputs.by_tensor(d_inputs)

    @staticmethod
    def jvp(ctx, *tangents):
        out, lse, _, *tensors = ctx.saved_tensors
        if "entropy" in ctx.call.options.more:
            raise derivative_of_entropy()
        call, along = filled(ctx.call, tensors), filled(ctx.call, tangents[3:])
        found = second.forward_jvp(call, ctx.joint, ctx.source, out, lse, along)
        return *found, None, *(None for _ in call.options.more)

    @staticmethod
    def vmap(info, in_dims, call, joint, source, *tensors):
        dims, call = filled(call, in_dims[3:]), filled(call, tensors)
        folded, joint, score_mod, unfold = fold_forward(call, joint, source.score_mod, dims, info.batch_size)
        outputs = _apply(folded, joint, source._replace(score_mod=score_mod))
        return tuple(map(unfold, outputs)), (0,) * len(outputs)


def _without_gradient(outputs: Sequence[Tensor], more: Sequence[str]) -> list[Tensor]:
    named = zip(("out", "lse", "max_scores", *more), outputs, strict=True)
    return [output for name, output in named if name not in ("out", "lse", "entropy")]


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _apply(call: AttentionCall, joint: Any, source: second.Source) -> tuple[Tensor, ...]:
    rest, tensors = parts(call)
    return _AttentionFunction.apply(rest, joint, source, *tensors)


class _Shapes(torch.autograd.Function):
    """The op's outputs, unfilled. They require grad where its outputs do."""

    @staticmethod
    def forward(ctx, partial, more, query, value, *_inputs):
        outputs = chunked.empty_outputs(query, value, partial, more)
        ctx.mark_non_differentiable(*_without_gradient(outputs, more))
        return outputs


_thread = threading.local()


@contextlib.contextmanager
def only_shapes() -> Iterator[None]:
    """Have this thread's calls give unfilled outputs: making graphs of their mods takes most of Dynamo's time."""
    _thread.only_shapes = True
    try:
        yield
    finally:
        _thread.only_shapes = False


def _may_be_differentiated() -> bool:
    """Whether what a backward computes now may have derivatives."""
    return (
        torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    )


def _differentiable(call: AttentionCall, wanted: Sequence[bool], of_shards: bool) -> tuple[Tensor, ...]:
    """Run the op under autograd; `wanted` says whether the score and each capture of score_mod may need a gradient."""
    joint, score_mod = None, None
    if call.score_mod is not None:
        checked, captures = with_score_graph(call), call.inputs.score_captures
        score_mod = as_its_graph(call.score_mod, checked.score_mod, captures)
        joint = joint_graph(score_mod, call.query, captures, wanted)
        if isinstance(call.score_mod, LiftedMod):
            score_mod = as_its_graph(call.score_mod.as_it_ran(), checked.score_mod, captures)
        call = checked
    return _apply(call, joint, second.Source(score_mod, of_shards))


def _has_derivative(tensor: Tensor) -> bool:
    return (tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode has a derivative of it."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


@attention.py_impl(DispatchKey.Autograd)
def _autograd(*args):
    given = AttentionCall.read(*args)
    if getattr(_thread, "only_shapes", False) and not any(map(has_tangent, tensors_of(given))):
        kinds, rest = (given.inputs.partial, given.options.more), given.inputs.differentiable
        return _Shapes.apply(*kinds, given.query, given.value, given.key, *rest)
    call = prepare(given)
    inputs = (call.query, call.key, call.value, *call.inputs.differentiable)
    if any(map(_has_derivative, inputs)):
        wants_score = any(map(_has_derivative, (call.query, call.key, *call.inputs.stand_ins)))
        wanted = [wants_score, *map(_has_derivative, call.inputs.score_captures)]
        return _differentiable(call, wanted, second.of_shards(given.inputs))
    call = with_score_graph(call).with_inputs(stand_ins=())
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*call)


@attention_backward.py_impl(DispatchKey.Autograd)
def _backward_autograd(*args):
    call = BackwardCall.read(*args)
    if any(map(_has_derivative, (*rows_of(call), *call.inputs.score_captures))):
        return second.backward(call, second.Source(None))
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward(*args)


@attention.py_impl(TransformType.Grad)
@attention.py_impl(TransformType.Jvp)
@attention.py_impl(TransformType.Vmap)
def _transform(interpreter, *args):
    given = AttentionCall.read(*args)
    call = prepare(given)
    # Nothing here says which level wants which gradient: every capture that can have one may need it.
    captures = call.inputs.score_captures
    wanted = [True, *(c.dtype.is_floating_point or c.dtype.is_complex for c in captures)]
    return _differentiable(call, wanted, second.of_shards(given.inputs))


@attention_backward.py_impl(TransformType.Grad)
@attention_backward.py_impl(TransformType.Jvp)
@attention_backward.py_impl(TransformType.Vmap)
def _backward_transform(interpreter, *args):
    return second.backward(BackwardCall.read(*args), second.Source(None))


def _autocast(device_type: str, *args):
    call = AttentionCall.read(*args)
    dtype = torch.get_autocast_dtype(device_type)
    stays = torch.float64, *NARROW  # keys of 8 bits come with their scales
    q, k, v = (
        t.to(dtype) if t.is_floating_point() and t.dtype not in stays else t
        for t in (call.query, call.key, call.value)
    )
    with torch._C._DisableAutocast():
        return attention(*call._replace(query=q, key=k, value=v))


def _backward_autocast(*args):
    with torch._C._DisableAutocast():  # the inputs have been cast
        return attention_backward(*args)


for _key in (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA):
    attention_backward.py_impl(_key)(_backward_autocast)
attention.py_impl(DispatchKey.AutocastCPU)(functools.partial(_autocast, "cpu"))
attention.py_impl(DispatchKey.AutocastCUDA)(functools.partial(_autocast, "cuda"))
