"""What a call returns beside its output."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class AuxOutput(NamedTuple):
    """torch's AuxOutput, and what only flex_inductor has. None for what was not asked for."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    rng_state: RngState | None = None
    dropout_mask: Tensor | None = None  # bool [B, H, M, N]


REQUESTS = (of_torch.AuxRequest, AuxRequest)


def asked(request: Any, return_lse: bool) -> AuxRequest:
    """All that a call asks for. What has another type is refused by checks."""
    given = request if isinstance(request, REQUESTS) else ()
    found = AuxRequest(*given)
    return found._replace(lse=found.lse or return_lse)


def answer(request: Any, return_lse: bool, out: Tensor, found: AuxOutput) -> Any:
    """What the user gets."""
    if request is None:
        return (out, found.lse) if return_lse else out
    wanted = asked(request, return_lse)
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
