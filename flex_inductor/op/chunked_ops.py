"""The chunked route as two functional torch ops, for compiled code: mods and inputs come as text."""

from __future__ import annotations

import torch

from . import call_text, chunked
from .call import QKV

_library = torch.library.Library("flex_inductor", "FRAGMENT")
_library.define(
    "chunked_forward(Tensor query, Tensor key, Tensor value, Tensor[] tensors, str call) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(
    "chunked_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_out, "
    "Tensor? grad_lse, Tensor[] tensors, str call) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)


@torch.library.impl(_library, "chunked_forward", "CompositeExplicitAutograd")
@torch.no_grad()
def _forward(query, key, value, tensors, call):
    call = call_text.load(call, tensors)
    return chunked.forward(query, key, value, call.inputs, call.mods, call.scale)


@torch.library.register_fake("flex_inductor::chunked_forward", lib=_library)
def _forward_fake(query, key, value, tensors, call):
    return chunked.empty_outputs(query, value, call_text.load(call, tensors).inputs.partial)


@torch.library.impl(_library, "chunked_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _backward(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    call = call_text.load(call, tensors)
    *grads, captured = chunked.backward(
        query, key, value, out, lse, grad_out, grad_lse, call.inputs, call.mods, call.scale, call.wants
    )
    return [grad for grad in (*grads, *captured) if grad is not None]


@torch.library.register_fake("flex_inductor::chunked_backward", lib=_library)
def _backward_fake(query, key, value, out, lse, grad_out, grad_lse, tensors, call):
    call = call_text.load(call, tensors)
    grads = [
        chunked.empty_gradient(tensor, call.inputs.partial)
        for name, tensor in zip(QKV, (query, key, value), strict=True)
        if name in call.wants
    ]
    captures = zip(call.inputs.score_captures, call.wanted_captures, strict=True)
    return grads + [torch.empty(c.shape, dtype=c.dtype, device=c.device) for c, wanted in captures if wanted]
