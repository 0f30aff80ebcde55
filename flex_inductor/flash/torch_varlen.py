"""torch.nn.attention.varlen's function, on any device and with mods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import errors
from ..checks import refused
from .arguments import PACKED, PAGES, check_layout
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
    """Call `flash_attn_varlen_func` with the arguments of `torch.nn.attention.varlen.varlen_attn`.

    Args:
        query: [T, H, D].
        key: [S, Hk, D], or pages [pages, page_size, Hk, D].
        value: the same with V in the place of D.
        cu_seq_q: int32 [sequences + 1].
        cu_seq_k: the same of keys; None with pages.
        max_q: at least the most queries of a sequence.
        max_k: at least the most keys of a sequence.
        return_aux: torch's AuxRequest: with its `lse`, return (out, lse).
        scale: 1/sqrt(D) by default.
        window_size: as in `flash_attn_func`; (-1, 0) is causal.
        enable_gqa: let groups of query heads share a head of keys and values.
        seqused_k: int32 [sequences], how many keys of each there are.
        block_table: int32 [sequences, most pages].
        num_splits: as in `flash_attn_func`.
        score_mod, mask_mod: as in `flash_attn_varlen_func`.

    Returns:
        Tensor: [T, H, V], or (out, lse [H, T]).

    Raises:
        FlexValueError: as `flash_attn_varlen_func`, or heads differ without `enable_gqa`.

    Example:
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> query, key, value = torch.randn(3, 10, 2, 8)
        >>> flash.varlen_attn(query, key, value, cu, cu, 7, 7, window_size=(-1, 0)).shape
        torch.Size([10, 2, 8])
    """
    check_layout("query", query, PACKED)
    check_layout("key", key, PACKED if block_table is None else PAGES)
    if return_aux is not None and not hasattr(return_aux, "lse"):
        refused(errors.bad_aux(return_aux))
    if not enable_gqa and query.size(1) != key.size(-2):
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
