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

from .. import build
from . import graph_text
from .hop import AttentionCall, WrappedMod, attention, prepare, with_score_graph
from .schedule import FORMS, schedule_of
from .tracing import trace_joint

_library = torch.library.Library("flex_inductor", "FRAGMENT")
_library.define(
    "saved_attention(Tensor query, Tensor key, Tensor value, Tensor?[] schedule, str call, Tensor[] score_captures, "
    "Tensor[] mask_captures) -> (Tensor, Tensor, Tensor)"
)


def save(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """The call as the op that can be saved."""
    call = prepare(call)
    joint: Any = None
    if call.score_mod is not None:
        checked = with_score_graph(call)
        inputs = (call.query, call.key, call.value, *call.score_captures)
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            # Of all that can have a gradient: what asks for it is only known when the saved call runs.
            wanted = [True, *(capture.is_floating_point() for capture in call.score_captures)]
            joint = trace_joint(call.score_mod, call.query, call.score_captures, wanted)
        call = checked
    graphs = {"score_mod": call.score_mod, "joint": joint, "mask_mod": call.mask_mod}
    schedule = schedule_of(call.schedule)
    text = graph_text.dump(
        {
            "form": schedule.form if schedule else "",
            "blocks": list(call.schedule[:2]),
            "scale": float(call.scale),
            "options": {name: value for name, value in call.options.items() if name != "build"},
            **{
                name: None if graph is None else graph_text.graph_data(graph)
                for name, graph in graphs.items()
            },
        }
    )
    return torch.ops.flex_inductor.saved_attention(
        call.query,
        call.key,
        call.value,
        list(call.schedule[2:10]),
        text,
        list(call.score_captures),
        list(call.mask_captures),
    )


@torch.library.impl(_library, "saved_attention", "CompositeImplicitAutograd")
def _run(query, key, value, schedule, call, score_captures, mask_captures):
    # Packaged code gives no list where it is empty.
    schedule, score_captures, mask_captures = schedule or (), score_captures or (), mask_captures or ()
    saved = _read(call)
    return attention(
        query,
        key,
        value,
        (*saved.blocks, *schedule, *(("runs",) if saved.form == "runs" else ())),
        saved.score_mod and WrappedMod(saved.score_mod, _names(score_captures)),
        saved.mask_mod and WrappedMod(saved.mask_mod, _names(mask_captures)),
        saved.scale,
        {**saved.options, "build": build.FINGERPRINT},
        tuple(score_captures),
        tuple(mask_captures),
    )


def _names(captures: Any) -> list[str]:
    return [f"capture_{i}" for i in range(len(captures))]


class _Saved(NamedTuple):
    form: str
    blocks: list[int]
    scale: float
    options: dict[str, Any]
    score_mod: Callable | None
    mask_mod: Callable | None


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> _Saved:
    names = ("form", "blocks", "scale", "options", "score_mod", "joint", "mask_mod")
    form, blocks, scale, options, score_mod, joint, mask_mod = graph_text.fields(
        graph_text.load(text), *names
    )
    graph_text.expect(form in ("", *FORMS), f"a schedule has the form {str(form)[:80]}")
    sizes = isinstance(blocks, list) and all(map(graph_text.is_count, blocks))
    graph_text.expect(sizes and len(blocks) == (2 if form else 0), f"blocks are {str(blocks)[:80]}")
    graph_text.expect(type(scale) is float, f"the scale is {str(scale)[:80]}")
    plain = isinstance(options, dict) and all(type(v) in (bool, int, float, str) for v in options.values())
    graph_text.expect(plain, f"the options are {str(options)[:80]}")
    score: Any
    score, derivative, mask = (
        None if data is None else graph_text.graph_function(data) for data in (score_mod, joint, mask_mod)
    )
    if derivative is not None:
        score = functools.partial(_differentiable, score, derivative)
    return _Saved(form, blocks, scale, options, score, mask)


def _differentiable(function: Callable, joint: Callable, *args: Tensor) -> Tensor:
    return _ScoreMod.apply(function, joint, *args)


class _ScoreMod(torch.autograd.Function):
    """A score_mod with the derivative that it had when it was saved, which need not be that of its graph."""

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
