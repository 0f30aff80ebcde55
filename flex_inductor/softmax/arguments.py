"""What a call asks of the softmax itself, beside its mods.

A sink is one more score for each row of a head. It takes weight and has no value:

    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))        lse = log(sum_j exp(s_j) + exp(sink))

Given this logsumexp, all other gradients are computed as without sinks. Dropout leaves weights out after they are
divided by their sum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dropout, errors

RngState = tuple[Tensor, Tensor]  # seed and offset
_INTEGERS = (int, torch.SymInt)


class Softmax(NamedTuple):
    """The arguments as the user gave them."""

    sinks: Tensor | None = None  # [H]
    dropout_p: float = 0
    rng_state: RngState | None = None
    head_offset: int = 0

    def check(self, query: Tensor) -> None:
        """Refuse what does not fit queries [B, H, M, D]."""
        sinks, heads = self.sinks, query.size(1)
        if sinks is not None:
            if (
                not isinstance(sinks, Tensor)
                or not sinks.is_floating_point()
                or tuple(sinks.shape) != (heads,)
            ):
                raise errors.bad_sinks(sinks, heads)
            if sinks.device != query.device:
                raise errors.sinks_device(sinks.device, query.device)
        number = isinstance(self.dropout_p, (*_INTEGERS, float, torch.SymFloat))
        if not number or isinstance(self.dropout_p, bool) or not 0.0 <= self.dropout_p < 1.0:
            raise errors.bad_dropout(self.dropout_p)
        if not isinstance(self.head_offset, _INTEGERS) or not 0 <= self.head_offset < dropout.HEADS:
            raise errors.bad_head_offset(self.head_offset, dropout.HEADS)
        if self.dropout_p and self.head_offset + heads > dropout.HEADS:
            raise errors.too_many_heads(self.head_offset, heads, dropout.HEADS)
        if self.rng_state is not None:
            self._check_state(query.device)

    def _check_state(self, device: torch.device) -> None:
        state: Any = self.rng_state
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise errors.bad_rng_state(state)
        for part in state:
            if not isinstance(part, Tensor) or part.dtype != torch.int64 or part.dim():
                raise errors.bad_rng_state(part)
            if part.device != device:
                raise errors.rng_state_device(part.device, device)

    def drawn(self, query: Tensor) -> Softmax:
        """With a state of the device's generator where dropout needs one."""
        if not self.dropout_p or self.rng_state is not None:
            return self
        seed = torch.randint(0, torch.iinfo(torch.int64).max, (), dtype=torch.int64, device=query.device)
        # _replace fails at a graph break of torch 2.11.
        return Softmax(self.sinks, self.dropout_p, (seed, torch.zeros_like(seed)), self.head_offset)

    def of_heads(self, first: Any, count: Any) -> Softmax:
        """Of these heads alone. Dropout sees the heads that mods see."""
        return self._replace(sinks=None if self.sinks is None else self.sinks.narrow(0, first, count))

    def inputs(self, query: Tensor) -> dict[str, Any]:
        """The op's inputs, by name; of dropout once its state is drawn."""
        found = {}
        if self.sinks is not None:
            found["sinks"] = self.sinks.to(torch.promote_types(query.dtype, torch.float32)).unsqueeze(0)
        if self.dropout_p and self.rng_state is not None:
            seed, offset = self.rng_state
            constants = [torch.full_like(seed, n) for n in (self.head_offset, dropout.levels(self.dropout_p))]
            found["dropout"] = torch.stack([seed, offset, *constants])
        return found


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp of rows [B, H, M], from those without sinks."""
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    share, _ = shares(lse, sinks)
    return out * share.unsqueeze(-1), torch.logaddexp(lse, sinks)


def entropy_with_sinks(entropy: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The entropy of rows [B, H, M], from that and the logsumexp without sinks."""
    return entropy_of_both(
        entropy, torch.zeros_like(entropy), *shares(lse, sinks.to(lse.dtype).unsqueeze(-1))
    )


def entropy_of_both(one: Tensor, other: Tensor, share: Tensor, rest: Tensor) -> Tensor:
    """The entropy of rows, from those of two parts of their weights and from the parts' shares."""
    return one * share + other * rest + torch.special.entr(share) + torch.special.entr(rest)


def shares(lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What each of two parts of rows has of their weights; all is the second's where both are empty."""
    # The difference is small: exp(lse - total) would carry the rounding of a large lse.
    ahead = (lse - other_lse).where(torch.maximum(lse, other_lse) != -math.inf, -math.inf)
    return torch.sigmoid(ahead), torch.sigmoid(-ahead)


def weight_of_sinks(sinks: Tensor, lse: Tensor) -> Tensor:
    """0 in rows that are in no tile of a map."""
    return (sinks.to(lse.dtype).unsqueeze(-1) - torch.where(lse != -math.inf, lse, math.inf)).exp()


def gradient_of_sinks(
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """That of the sinks, from the results that count them; the gradient of lse as the op's backward gets it."""
    through = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if grad_out is not None:
        through = through - (out.to(lse.dtype) * grad_out.to(lse.dtype)).sum(-1)
    weight = weight_of_sinks(sinks, lse)
    terms = weight * through
    if grad_entropy is not None:
        terms = terms + torch.special.entr(weight) * grad_entropy
    rows = torch.where(lse > -math.inf, terms, 0.0).sum(-1)
    return (rows.sum(0, keepdim=True) if sinks.size(0) == 1 else rows).to(sinks.dtype)
