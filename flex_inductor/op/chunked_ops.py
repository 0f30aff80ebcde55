"""The chunked route as two functional torch ops, for compiled code: mods come as text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import chunked
from .layout import empty_like_layout
from .program import LaneProgram
from .schedule import FORMS, Schedule

_library = torch.library.Library("flex_inductor", "FRAGMENT")
_library.define(
    "chunked_forward(Tensor query, Tensor key, Tensor value, str form, int[] blocks, Tensor?[] schedule, "
    "str score_mod, str mask_mod, float scale, Tensor[] score_captures, Tensor[] mask_captures) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(
    "chunked_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_out, "
    "Tensor? grad_lse, str form, int[] blocks, Tensor?[] schedule, str score_mod, str mask_mod, float scale, "
    "str joint, str wants, bool[] wanted_captures, Tensor[] score_captures, Tensor[] mask_captures) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def wanted_gradients(joint: Any, count: int) -> list[bool]:
    """Which captures the joint graph has a gradient for."""
    if joint is None:
        return [False] * count
    (outputs,) = (node.args[0] for node in joint.graph.nodes if node.op == "output")
    return [output is not None for output in outputs[1:]]


def mods_from(
    score_mod: str, mask_mod: str, score_captures: list[Tensor] | None, mask_captures: list[Tensor] | None
) -> chunked.Mods:
    # Packaged code gives no list where it is empty.
    return chunked.Mods(
        program_from(score_mod),
        program_from(mask_mod),
        tuple(score_captures or ()),
        tuple(mask_captures or ()),
    )


def program_from(text: str) -> LaneProgram | None:
    return LaneProgram.from_text(text) if text else None


def schedule_from(form: str, blocks: list[int], tensors: list[Tensor | None]) -> Schedule | None:
    return FORMS[form](*blocks, *tensors) if form else None


@torch.library.impl(_library, "chunked_forward", "CompositeExplicitAutograd")
@torch.no_grad()
def _forward(
    query, key, value, form, blocks, schedule, score_mod, mask_mod, scale, score_captures, mask_captures
):  # fmt: skip
    mods = mods_from(score_mod, mask_mod, score_captures, mask_captures)
    return chunked.forward(query, key, value, schedule_from(form, blocks, schedule), mods, scale)


@torch.library.register_fake("flex_inductor::chunked_forward", lib=_library)
def _forward_fake(query, key, value, *_):
    return chunked.empty_outputs(query, value)


@torch.library.impl(_library, "chunked_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _backward(
    query, key, value, out, lse, grad_out, grad_lse, form, blocks, schedule, score_mod, mask_mod, scale, joint,
    wants, wanted_captures, score_captures, mask_captures,
):  # fmt: skip
    mods = mods_from(score_mod, mask_mod, score_captures, mask_captures)
    *grads, captured = chunked.backward(
        query, key, value, out, lse, grad_out, grad_lse,
        schedule_from(form, blocks, schedule), mods, program_from(joint), scale, [name in wants for name in "qkv"],
    )  # fmt: skip
    return [grad for grad in (*grads, *captured) if grad is not None]


@torch.library.register_fake("flex_inductor::chunked_backward", lib=_library)
def _backward_fake(
    query, key, value, out, lse, grad_out, grad_lse, form, blocks, schedule, score_mod, mask_mod, scale, joint,
    wants, wanted_captures, score_captures, mask_captures,
):  # fmt: skip
    grads = [
        empty_like_layout(tensor, tensor.shape)
        for name, tensor in zip("qkv", (query, key, value), strict=True)
        if name in wants
    ]
    return grads + [
        torch.empty(capture.shape, dtype=capture.dtype, device=capture.device)
        for capture, wanted in zip(score_captures, wanted_captures, strict=True)
        if wanted
    ]
