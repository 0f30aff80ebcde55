"""Derivatives beyond the gradient: forward mode, and derivatives of the backward op.

The backward takes lse and delta = grad_out . out - grad_lse for each row, and autograd knows what they come from. So
the derivative of the backward is one walk over tiles (`eager/second.py`), and what out and lse get from it goes through
the ordinary backward. docs/derivatives.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import errors
from ..mod_ir.arguments import score_dtype
from ..mod_ir.checks import derivative_graph, joint_graph
from ..mod_ir.derivatives import trace_backward_jvp, trace_backward_vjp, trace_tangent
from ..mod_ir.split import second_programs
from ..softmax import weight_of_sinks
from ..softmax.errors import derivative_of_entropy
from . import call_text
from .call import (
    QKV,
    AttentionCall,
    BackwardCall,
    Inputs,
    check_served,
    filled,
    is_guarded,
    parts,
    wanted_gradients,
)
from .eager.second import SERVES
from .hop import attention_backward
from .vmap import fold_backward


class Source(NamedTuple):
    """What the further derivatives of a call are made from."""

    score_mod: Callable | None  # as for the joint graph: the call's own has lost what it detaches
    of_shards: bool = False  # of a part of the sequence: exchanges between ranks have no second derivative


def of_shards(inputs: Inputs) -> bool:
    """Whether a call has a part of its sequence."""
    return bool(inputs.sharded or inputs.ring or inputs.stand_ins or inputs.partial)


class _Given(NamedTuple):
    call: AttentionCall
    wanted: Sequence[bool]  # which captures have a direction
    rows: tuple[Tensor, ...]  # lse; for derivatives of the backward also grad_out and delta
    along: tuple[Tensor, ...]  # directions of query, key, value and captures
    rows_along: tuple[Tensor, ...] = ()

    def by_tensor(self, of_call: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of query, key, value and captures, in the order of the call's tensors."""
        return [*of_call[:3], *self.call.inputs.by_tensor(_spread(of_call[3:], self.wanted))]


class _Second(torch.autograd.Function):
    """A function of `eager/second.py`, by name."""

    @staticmethod
    def forward(name, source, rest, *tensors):
        if any(map(torch._C._functorch.is_legacy_batchedtensor, tensors)):
            raise errors.batched_gradients()
        with torch._C._DisableAutocast():
            return tuple(_computed(name, source, filled(rest, tensors)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name, ctx.source, ctx.rest, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        if ctx.name != "forward_jvp":
            raise errors.third_derivative()
        # <grads, results> is <backward, along> with these rows: each has the derivatives of the other.
        given: _Given = filled(ctx.rest, ctx.saved_tensors)
        call, grad_out = given.call, grads[0].to(given.call.query.dtype)
        *of_call, d_lse, _, _ = _apply(
            "backward_vjp", ctx.source, given._replace(rows=(*given.rows, grad_out, -grads[1]))
        )
        joint: Any = None
        if call.score_mod is not None:
            wanted = [True, *given.wanted]
            joint = joint_graph(ctx.source.score_mod, call.query, call.inputs.score_captures, wanted)
        *d_along, d_captures = attention_backward(
            *call[:3], torch.zeros_like(grad_out), given.rows[0], grad_out, grads[1],
            call.score_mod, joint, call.mask_mod, call.scale, QKV, call.inputs, call.options,
        )  # fmt: skip
        d_along += [grad for grad, want in zip(d_captures, given.wanted, strict=True) if want]
        return None, None, None, *given.by_tensor(of_call), d_lse, *d_along

    @staticmethod
    def jvp(ctx, *_tangents):
        raise errors.third_derivative() if ctx.name != "forward_jvp" else errors.forward_over_forward()

    @staticmethod
    def vmap(info, in_dims, name, source, rest, *tensors):
        def example(i: int) -> Any:
            own = [
                t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[3:], strict=True)
            ]
            return _Second.apply(name, source, rest, *own)

        results = [*zip(*map(example, range(info.batch_size)), strict=True)]
        return tuple(map(torch.stack, results)), (0,) * len(results)


def _apply(name: str, source: Source, given: _Given) -> Any:
    if source.of_shards:
        raise errors.derivative_of_shards()
    rest, tensors = parts(given)
    return _Second.apply(name, source, rest, *tensors)


_SECOND = {"backward_vjp": trace_backward_vjp, "backward_jvp": trace_backward_jvp}


def _computed(name: str, source: Source, given: _Given) -> list[Tensor]:
    call, inputs = given.call, given.call.inputs
    if inputs.kv_scales:
        raise errors.derivative_of_narrow()
    if inputs.grad_entropy is not None:
        raise derivative_of_entropy()
    check_served(inputs, SERVES)
    graphs: list[Any] = []
    if call.score_mod is not None:
        mod, captures = source.score_mod, inputs.score_captures
        if mod is None:
            raise errors.derivative_of_trace()
        tangent = derivative_graph(trace_tangent, mod, call.query, captures, given.wanted)
        graphs = [None, tangent]
        if name in _SECOND:
            second = derivative_graph(_SECOND[name], mod, call.query, captures, given.wanted)
            of_score = [True, *(False for _ in captures)]
            graphs = [joint_graph(mod, call.query, captures, of_score), tangent, second]
    guarded = is_guarded(call.mask_mod, inputs)
    mods = second_programs(call.score_mod, call.mask_mod, *graphs, guarded=guarded)
    text, tensors = call_text.dump(inputs, mods, float(call.scale))
    given_tensors = ([*of] for of in (given.rows, given.along, given.rows_along))
    return getattr(torch.ops.flex_inductor, name)(*call[:3], *given_tensors, tensors, text)


def forward_jvp(
    call: AttentionCall, joint: Any, source: Source, out: Tensor, lse: Tensor, tangents: AttentionCall
) -> tuple[Tensor, Tensor]:
    """The tangents of output and logsumexp."""
    wanted = wanted_gradients(joint, len(call.inputs.score_captures))
    along = _along((*call[:3], *_chosen(call.inputs.score_captures, wanted)),
                   (*tangents[:3], *_chosen(tangents.inputs.score_captures, wanted)))  # fmt: skip
    without_sinks = call.with_inputs(sinks=None)  # their weight is in lse
    of_out, of_lse = _apply("forward_jvp", source, _Given(without_sinks, wanted, (lse,), along))
    sinks = call.inputs.sinks
    if sinks is not None and tangents.inputs.sinks is not None:
        of_lse = of_lse + weight_of_sinks(sinks, lse) * tangents.inputs.sinks.to(lse.dtype).unsqueeze(-1)
    return (of_out - of_lse.unsqueeze(-1) * out).to(out.dtype), of_lse


class _Backward(torch.autograd.Function):
    """The backward op."""

    @staticmethod
    def forward(source, rest, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            *grads, captured = attention_backward(*filled(rest, tensors))
        return (*grads, *captured)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.source, ctx.rest, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        call: BackwardCall = filled(ctx.rest, ctx.saved_tensors)
        given = _given(call, (*grads[:3], *_chosen(grads[3:], _wanted(call))))
        *of_call, d_lse, d_grad_out, d_delta = _apply("backward_vjp", ctx.source, given)
        d_delta, grad_out = d_delta.unsqueeze(-1), given.rows[1]
        d_out = (d_delta * grad_out).to(call.out.dtype)
        upstream = (d_grad_out + d_delta * call.out).to(grad_out.dtype), -d_delta.squeeze(-1)
        d_upstream = [
            d for d, of in zip(upstream, (call.grad_out, call.grad_lse), strict=True) if of is not None
        ]
        d_query, d_key, d_value, *d_inputs = given.by_tensor(of_call)
        return None, None, d_query, d_key, d_value, d_out, d_lse, *d_upstream, *d_inputs

    @staticmethod
    def jvp(ctx, *tangents):
        call: BackwardCall = filled(ctx.rest, ctx.saved_tensors)
        to: BackwardCall = filled(ctx.rest, tangents[2:])
        given = _given(call, (*to[:3], *_chosen(to.inputs.score_captures, _wanted(call))))
        lse, grad_out, _ = given.rows
        of_rows = (call.out, lse, grad_out, lse if call.grad_lse is None else call.grad_lse)
        out_along, lse_along, grad_out_along, grad_lse_along = _along(of_rows, to[3:7])
        delta_along = _delta(grad_out_along, call.out, grad_lse_along) + _delta(grad_out, out_along, None)
        given = given._replace(rows_along=(lse_along, grad_out_along, delta_along))
        d_query, d_key, d_value, *d_captures = _apply("backward_jvp", ctx.source, given)
        of_qkv = zip(QKV, (d_query, d_key, d_value), strict=True)
        return *(d if name in call.wants else None for name, d in of_qkv), *_spread(d_captures, given.wanted)

    @staticmethod
    def vmap(info, in_dims, source, rest, *tensors):
        call, dims = filled(rest, tensors), filled(rest, in_dims[2:])
        folded, score_mod, unfold = fold_backward(call, source.score_mod, dims, info.batch_size)
        grads = unfold(backward(folded, source._replace(score_mod=score_mod)))
        return grads, tuple(None if grad is None else 0 for grad in grads)


def backward(call: BackwardCall, source: Source) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple]:
    """The backward op, with derivatives."""
    rest, tensors = parts(call)
    d_query, d_key, d_value, *captured = _Backward.apply(source, rest, *tensors)
    return d_query, d_key, d_value, tuple(captured)


def _given(call: BackwardCall, along: Sequence[Tensor | None]) -> _Given:
    """What the derivative along a direction needs. None in `along` means zero."""
    wanted = _wanted(call)
    inputs, grad_out = call.inputs, call.grad_out
    forward = AttentionCall(*call[:3], call.score_mod, call.mask_mod, call.scale, inputs, call.options)
    if grad_out is None:
        grad_out = torch.zeros_like(call.out)
    rows = (call.lse, grad_out, _delta(grad_out, call.out, call.grad_lse))
    of = (*call[:3], *_chosen(inputs.score_captures, wanted))
    return _Given(forward, wanted, rows, _along(of, along))


def _wanted(call: BackwardCall) -> list[bool]:
    return wanted_gradients(call.joint, len(call.inputs.score_captures))


def _delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    dtype = score_dtype(grad_out.dtype)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    return delta if grad_lse is None else delta - grad_lse


def _along(tensors: Sequence[Tensor], directions: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros_like(tensor) if direction is None else direction
        for tensor, direction in zip(tensors, directions, strict=True)
    )


def _chosen(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [value for value, want in zip(values, wanted, strict=True) if want]


def _spread(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The other way round: None where nothing is wanted."""
    found = iter(values)
    return [next(found) if want else None for want in wanted]
