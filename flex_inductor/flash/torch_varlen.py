"""torch.nn.attention.varlen's function, on any device and with mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import errors
from ..attention import refused
from .functions import MaskMod, flash_attn_varlen_func


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: MaskMod | None = None,
) -> Any:
    """`flash_attn_varlen_func` with the arguments of torch.nn.attention.varlen.varlen_attn.

    `window_size=(-1, 0)` is causal. Returns [T, H, V], or with `return_aux.lse` (out, lse [H, T]).
    """
    if not enable_gqa and isinstance(key, Tensor) and query.size(1) != key.size(-2):
        refused(errors.gqa_not_enabled(query.size(1), key.size(-2)))
    out, lse, _ = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        softmax_scale=scale,
        window_size=window_size,
        return_attn_probs=True,
        block_table=block_table,
        seqused_k=seqused_k,
        num_splits=num_splits or 0,
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    return (out, lse) if return_aux is not None and return_aux.lse else out
