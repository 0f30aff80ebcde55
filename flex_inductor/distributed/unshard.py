"""The parts of a sequence as one, on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import Traffic, exchanged
from .layout import Layout


def unshard(tensor: Tensor, dim: int, layout: Layout, rank: int, group: str, partial: bool = False) -> Tensor:
    """A rank's gradient of the whole is that of all ranks, or with `partial` one part of their sum."""
    order = torch.cat([layout.positions(other) for other in range(layout.ranks)])
    lengths = torch.tensor(layout.lengths)
    local = torch.full_like(lengths, layout.local_length(rank))
    traffic = Traffic(local, lengths, order)
    return _Unshard.apply(tensor, dim, *traffic, layout.positions(rank), group, partial)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, sent, received, came, positions, group, partial):
        ctx.dim, ctx.group, ctx.partial, ctx.length = dim, group, partial, tensor.size(dim)
        kept = came if partial else positions
        ctx.save_for_backward(kept.to(tensor.device), sent, received)
        rows = tensor.movedim(dim, 0)
        rows = rows.expand(sent.numel(), *rows.shape).flatten(0, 1)
        whole = exchanged(rows, sent, received, came.numel(), group)
        order = torch.argsort(came).to(tensor.device)
        return whole.index_select(0, order).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        positions, sent, received = ctx.saved_tensors
        grad = grad.index_select(ctx.dim, positions)
        if ctx.partial:
            ranks = sent.numel()
            parts = exchanged(grad.movedim(ctx.dim, 0), received, sent, ranks * ctx.length, ctx.group)
            wide = torch.promote_types(grad.dtype, torch.float32)
            summed = parts.unflatten(0, (ranks, ctx.length)).sum(0, dtype=wide)
            grad = summed.to(grad.dtype).movedim(0, ctx.dim)
        return grad, None, None, None, None, None, None, None
