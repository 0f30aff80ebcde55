"""A call of attention as one op of tensors and text, which torch.export can write into a file.

It cannot write the higher-order op: that has graphs and tuples of several types among its arguments. So where export
traces, the call becomes `flex_inductor::saved_attention`, and wherever that op runs or is decomposed it is the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mod_ir import serialise
from ..mod_ir.checks import joint_graph
from ..mod_ir.names import WrappedMod
from ..options import loaded_options, saved_options
from . import call_text
from .call import AttentionCall
from .library import FORWARD, LIBRARY
from .prepare import prepare, with_score_graph

LIBRARY.define(f"saved_attention{FORWARD}")


def save(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """The call as the op that can be saved."""
    call = prepare(call)
    joint: Any = None
    captures = call.inputs.score_captures
    if call.score_mod is not None:
        checked = with_score_graph(call)
        tensors = (call.query, call.key, call.value, *call.inputs.differentiable)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            # Gradients of everything that can have one: what needs one is known only when the saved call runs.
            wanted = [True, *(capture.is_floating_point() for capture in captures)]
            joint = joint_graph(call.score_mod, call.query, captures, wanted)
        call = checked
    graphs = {"score_mod": call.score_mod, "joint": joint, "mask_mod": call.mask_mod}
    inputs, given = call_text.inputs_data(call.inputs)
    text = serialise.dump(
        {
            "inputs": inputs,
            "scale": float(call.scale),
            "options": saved_options(call.options),
            **{
                name: None if graph is None else serialise.graph_data(graph) for name, graph in graphs.items()
            },
        }
    )
    return torch.ops.flex_inductor.saved_attention(call.query, call.key, call.value, given, text)


@torch.library.impl(LIBRARY, "saved_attention", "CompositeImplicitAutograd")
def _run(query, key, value, tensors, call):
    saved = _read(call)
    inputs = call_text.inputs_from(saved.inputs, tensors)
    return torch.ops.higher_order.flex_inductor_attention(
        query,
        key,
        value,
        saved.score_mod and WrappedMod(saved.score_mod, _names(inputs.score_captures)),
        saved.mask_mod and WrappedMod(saved.mask_mod, _names(inputs.mask_captures)),
        saved.scale,
        inputs,
        loaded_options(saved.options),
    )


def _names(captures: Any) -> list[str]:
    return [f"capture_{i}" for i in range(len(captures))]


class _Saved(NamedTuple):
    inputs: Any  # as data
    scale: float
    options: dict[str, Any]
    score_mod: Callable | None
    mask_mod: Callable | None


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> _Saved:
    names = ("inputs", "scale", "options", "score_mod", "joint", "mask_mod")
    inputs, scale, options, score_mod, joint, mask_mod = serialise.fields(serialise.load(text), *names)
    serialise.expect(type(scale) is float, f"the scale is {str(scale)[:80]}")
    hints, lse, max_scores = serialise.fields(options, "hints", "lse", "max_scores")
    plain = isinstance(hints, dict) and all(type(v) in (bool, int, float, str) for v in hints.values())
    serialise.expect(
        plain and {type(lse), type(max_scores)} == {bool}, f"the options are {str(options)[:80]}"
    )
    score: Any
    score, derivative, mask = (
        None if data is None else serialise.graph_function(data) for data in (score_mod, joint, mask_mod)
    )
    if derivative is not None:
        score = functools.partial(_differentiable, score, derivative)
    return _Saved(inputs, scale, options, score, mask)


def _differentiable(function: Callable, joint: Callable, *args: Tensor) -> Tensor:
    return _ScoreMod.apply(function, joint, *args)


class _ScoreMod(torch.autograd.Function):
    """A score_mod with its derivative at the time of saving, which may differ from that of its graph."""

    @staticmethod
    def forward(function, joint, *args):
        return function(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.joint, *args = inputs
        ctx.save_for_backward(*args)

    @staticmethod
    def backward(ctx, grad):
        score, b, h, q_idx, kv_idx, *captures = ctx.saved_tensors
        d_score, *d_captures = ctx.joint(score, b, h, q_idx, kv_idx, grad, *captures)
        return None, None, d_score, None, None, None, None, *d_captures
