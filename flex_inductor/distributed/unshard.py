"""The parts of a sequence as one, on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import Traffic, exchanged
from .layout import Layout


def unshard(tensor: Tensor, dim: int, layout: Layout, rank: int, group: str) -> Tensor:
    order = torch.cat([layout.positions(other) for other in range(layout.ranks)])
    lengths = torch.tensor(layout.lengths)
    local = torch.full_like(lengths, layout.local_length(rank))
    return _Unshard.apply(tensor, dim, Traffic(local, lengths, order), layout.positions(rank), group)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, traffic, positions, group):
        ctx.dim = dim
        ctx.save_for_backward(positions.to(tensor.device))
        rows = tensor.movedim(dim, 0)
        rows = rows.expand(traffic.sent.numel(), *rows.shape).flatten(0, 1)
        came = exchanged(rows, traffic.sent, traffic.received, traffic.came.numel(), group)
        order = torch.argsort(traffic.came).to(tensor.device)
        return came.index_select(0, order).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        return grad.index_select(ctx.dim, positions), None, None, None, None
