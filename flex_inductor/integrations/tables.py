"""One call of the op, with the tables that frameworks have: masks and biases that broadcast to [B, H, M, N]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..masks import RunSchedule
from ..masks.schedule import schedule_parts
from ..op import Inputs, attention
from ..options import call_options
from ..softmax import Scales, Softmax


def attend_tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | BlockMask | RunSchedule | None,  # a tensor of booleans
    biases: Sequence[Tensor],
    scale: float,
    score_mod: Callable[..., Tensor] | None,
    softmax: Softmax,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output, and the logsumexp if `lse`. The biases come after `score_mod`."""

    def biased(score, b, h, q_idx, kv_idx):
        if score_mod is not None:
            score = score_mod(score, b, h, q_idx, kv_idx)
        for bias in biases:
            score = score + _entry(bias, b, h, q_idx, kv_idx)
        return score

    schedule: Any = None
    mask_mod: Callable[..., Tensor] | None = None
    if isinstance(mask, Tensor):
        mask_mod = functools.partial(_entry, mask)
    elif mask is not None:
        schedule, mask_mod = schedule_parts(mask)
    out, logsumexp, _ = attention(
        query,
        key,
        value,
        biased if biases else score_mod,
        mask_mod,
        scale,
        Inputs(schedule=schedule, **softmax.inputs(query), **Scales().of_rows(key, lambda scale: scale)),
        call_options(None, lse=lse, max_scores=False),
    )
    return out, logsumexp if lse else None


def _entry(table: Tensor, *indices: Tensor) -> Tensor:
    return table[tuple(0 if size == 1 else index for size, index in zip(table.shape, indices, strict=True))]
