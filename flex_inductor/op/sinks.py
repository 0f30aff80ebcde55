"""Sinks: one more score for each row of a head. It takes weight and has no value.

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))        lse = log(sum_j exp(s_j) + exp(sink))

With the logsumexp that counts the sink, the gradients of all else are those without one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp of rows [B, H, M], from those without sinks."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    share = (lse - total.where(total > -math.inf, 0.0)).exp()
    return out * share.unsqueeze(-1), total


def gradient(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None
) -> Tensor:
    """That of the sinks, from the results that count them."""
    through = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if grad_out is not None:
        through = through - (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    rows = torch.where(lse > -math.inf, weight * through, 0.0).sum(-1)  # -inf: in no tile of a map
    return (rows.sum(0, keepdim=True) if sinks.size(0) == 1 else rows).to(sinks.dtype)
