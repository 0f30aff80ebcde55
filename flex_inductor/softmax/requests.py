"""What a call returns beside its output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from . import dropout
from .arguments import RngState, Softmax


class AuxRequest(NamedTuple):
    """torch's AuxRequest, and what only flex_inductor has."""

    lse: bool = False
    max_scores: bool = False
    rng_state: bool = False  # of dropout; None where nothing is dropped
    dropout_mask: bool = False  # which weights dropout keeps, for tests: it takes a byte for each score
    head_max_scores: bool = False  # each head's largest score over all batches and rows, for QK-clip

    @property
    def maxima(self) -> bool:
        """Whether rows' largest scores are needed."""
        return self.max_scores or self.head_max_scores


class AuxOutput(NamedTuple):
    """torch's AuxOutput, and what only flex_inductor has. None for what was not asked for."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    rng_state: RngState | None = None
    dropout_mask: Tensor | None = None  # bool [B, H, M, N]
    head_max_scores: Tensor | None = None  # [H]


REQUESTS = (of_torch.AuxRequest, AuxRequest)


def asked(request: Any, return_lse: bool) -> AuxRequest:
    """All that a call asks for. What has another type is refused by checks."""
    given = request if isinstance(request, REQUESTS) else ()
    found = AuxRequest(*given)
    return found._replace(lse=found.lse or return_lse)


def over_rows(max_scores: Any) -> Tensor:
    """The largest of each head [B, H, M], -inf where there is none."""
    of_head = max_scores.detach().transpose(0, 1).flatten(1)
    return torch.nn.functional.pad(of_head, (0, 1), value=-torch.inf).amax(1)


def answer(request: Any, return_lse: bool, out: Tensor, found: AuxOutput, packed: bool = False) -> Any:
    """What the user gets. Rows of `packed` sequences are in one batch, which the user does not see."""
    wanted = asked(request, return_lse)
    if wanted.head_max_scores:
        found = found._replace(head_max_scores=over_rows(found.max_scores))
    if packed:
        rows = {name: getattr(found, name).squeeze(0) for name in ("lse", "max_scores")}
        found = found._replace(**rows)
    if request is None:
        return (out, found.lse) if return_lse else out
    values: list[Any] = [value if want else None for value, want in zip(found, wanted, strict=True)]
    kept = AuxOutput(*values)
    return out, of_torch.AuxOutput(*kept[:2]) if isinstance(request, of_torch.AuxRequest) else kept


def dropout_mask(
    softmax: Softmax, lanes: tuple[Tensor, Tensor, Tensor, Tensor], query: Tensor
) -> Tensor | None:
    """Which weights are kept at these indices, which broadcast."""
    if not softmax.dropout_p:
        return None
    return dropout.keeps(softmax.inputs(query)["dropout"], *lanes)
