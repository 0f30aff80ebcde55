"""What a call asks of the softmax itself, beside its mods.

A sink is one more score for each row of a head. It takes weight and has no value:

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))        lse = log(sum_j exp(s_j) + exp(sink))

With the logsumexp that counts the sink, the gradients of all else are those without one. Dynamo traces this file.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import errors


class Softmax(NamedTuple):
    """The arguments as the user gave them."""

    sinks: Tensor | None = None  # [H]

    def check(self, query: Tensor) -> None:
        """Refuse what does not fit queries [B, H, M, D]."""
        sinks, heads = self.sinks, query.size(1)
        if sinks is None:
            return
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
            raise errors.bad_sinks(sinks, heads)
        if sinks.device != query.device:
            raise errors.sinks_device(sinks.device, query.device)

    def of_heads(self, first: Any, count: Any) -> Softmax:
        """Of these heads alone."""
        return Softmax(None if self.sinks is None else self.sinks.narrow(0, first, count))

    def inputs(self, query: Tensor) -> dict[str, Any]:
        """The op's inputs, by name."""
        if self.sinks is None:
            return {}
        return {"sinks": self.sinks.to(torch.promote_types(query.dtype, torch.float32)).unsqueeze(0)}


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp of rows [B, H, M], from those without sinks."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    share = (lse - total.where(total > -math.inf, 0.0)).exp()
    return out * share.unsqueeze(-1), total


def weight_of_sinks(sinks: Tensor, lse: Tensor) -> Tensor:
    """0 in rows that are in no tile of a map."""
    return (sinks.to(lse.dtype).unsqueeze(-1) - torch.where(lse > -math.inf, lse, math.inf)).exp()


def gradient_of_sinks(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> Tensor:
    """That of the sinks, from the results that count them."""
    through = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if grad_out is not None:
        through = through - (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    rows = torch.where(lse > -math.inf, weight_of_sinks(sinks, lse) * through, 0.0).sum(-1)
    return (rows.sum(0, keepdim=True) if sinks.size(0) == 1 else rows).to(sinks.dtype)
