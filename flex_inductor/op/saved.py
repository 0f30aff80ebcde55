"""A call of attention as one op of tensors and text, which torch.export can write into a file.

It cannot write the higher-order op: that has graphs and tuples of several types among its arguments. So where export
traces, the call becomes `flex_inductor::saved_attention`, and wherever that op runs or is decomposed it is the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mod_ir.checks import joint_graph
from ..mod_ir.names import WrappedMod
from . import call_text
from .call import AttentionCall
from .call_text import Graphs
from .library import FORWARD, LIBRARY
from .prepare import prepare, with_score_graph

LIBRARY.define(f"saved_attention{FORWARD}")


def save(call: AttentionCall) -> tuple[Tensor, ...]:
    """The call as the op that can be saved."""
    call = prepare(call)
    joint: Any = None
    captures = call.inputs.score_captures
    if call.score_mod is not None:
        checked = with_score_graph(call)
        tensors = (call.query, call.key, call.value, *call.inputs.differentiable)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            # Gradients of everything that can have one: what needs one is known only when the saved call runs.
            wanted = [True, *(capture.is_floating_point() or capture.is_complex() for capture in captures)]
            joint = joint_graph(call.score_mod, call.query, captures, wanted)
        call = checked
    score, mask = call[3:5]
    text, given = call_text.dump(call.inputs, Graphs(score, mask, joint), float(call.scale), (), call.options)
    return tuple(torch.ops.flex_inductor.saved_attention(call.query, call.key, call.value, given, text))


@torch.library.impl(LIBRARY, "saved_attention", "CompositeImplicitAutograd")
def _run(query, key, value, tensors, call):
    saved = call_text.load(call, tensors, Graphs)
    (score, mask, joint), inputs = saved.mods, saved.inputs
    if joint is not None:
        score = functools.partial(_ScoreMod.apply, score, joint)
    results = torch.ops.higher_order.flex_inductor_attention(
        query,
        key,
        value,
        score and WrappedMod(score, _names(inputs.score_captures)),
        mask and WrappedMod(mask, _names(inputs.mask_captures)),
        saved.scale,
        inputs,
        saved.options,
    )
    return [*results]


def _names(captures: Any) -> list[str]:
    return [f"capture_{i}" for i in range(len(captures))]


class _ScoreMod(torch.autograd.Function):
    """A score_mod with its derivative at the time of saving, which may differ from that of its graph."""

    @staticmethod
    def forward(function, joint, *args):
        found = function(*args)
        return found.view_as(found)  # autograd takes no argument that is also what comes back

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.joint, *args = inputs
        ctx.save_for_backward(*args)

    @staticmethod
    @once_differentiable  # the joint graph has lost what the mod detaches
    def backward(ctx, grad):
        score, b, h, q_idx, kv_idx, *captures = ctx.saved_tensors
        d_score, *d_captures = ctx.joint(score, b, h, q_idx, kv_idx, grad, *captures)
        return None, None, d_score, None, None, None, None, *d_captures
