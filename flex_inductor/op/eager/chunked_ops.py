"""The chunked route as two functional torch ops, for compiled code: mods and inputs come as text."""

from __future__ import annotations

import functools

import torch

from ...mod_ir.split import Programs
from .. import call_text
from ..library import BACKWARD, FORWARD, define
from . import chunked


@torch.no_grad()
def _forward(query, key, value, tensors, call):
    call = call_text.load(call, tensors, Programs)
    return [*chunked.forward(query, key, value, call.inputs, call.mods, call.scale, call.options.more)]


def _forward_fake(query, key, value, tensors, call):
    call = call_text.load(call, tensors, Programs)
    return [*chunked.empty_outputs(query, value, call.inputs.partial, call.options.more)]


@torch.no_grad()
def _backward(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    call = call_text.load(call, tensors, Programs)
    *grads, captured = chunked.backward(
        query, key, value, out, lse, grad_out, grad_lse, call.inputs, call.mods, call.scale, call.wants
    )
    return [grad for grad in (*grads, *captured) if grad is not None]


def backward_fake(mods, query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    call = call_text.load(call, tensors, mods)
    *grads, captured = chunked.empty_gradients(
        (query, key, value), call.inputs, call.wants, call.wanted_captures
    )
    return [grad for grad in (*grads, *captured) if grad is not None]


define("chunked_forward", FORWARD, _forward, _forward_fake)
define("chunked_backward", BACKWARD, _backward, functools.partial(backward_fake, Programs))
