"""What FlashAttention's arguments are here, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors as call_errors
from ..checks import refused
from ..masks.analysis.window import MOST
from ..options import NUM_SPLITS
from ..sequences.sequences import check_numbers, check_offsets, check_table
from ..visits.window import Window
from . import errors

PADDED, PACKED = "[batch, length, heads, head_dim]", "[tokens, heads, head_dim]"
PAGES = "[pages, page_size, heads, head_dim]"
_INTEGERS = (int, torch.SymInt)


def check_layout(name: str, tensor: Any, layout: str, parts: int = 0) -> None:
    """`layout` names the dimensions. With `parts`, so many tensors lie side by side before the heads."""
    if not isinstance(tensor, Tensor):
        refused(call_errors.not_a_tensor(name, tensor))
    if tensor.dim() != layout.count(",") + 1 or (parts and tensor.size(-3) != parts):
        refused(errors.other_layout(name, tensor, layout))


def check_window(window_size: Any, attention_chunk: Any) -> None:
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or not all(n is None or isinstance(n, _INTEGERS) for n in window_size):
        refused(errors.bad_window(window_size))
    if type(attention_chunk) is not int or attention_chunk < 0:
        refused(errors.bad_chunk(attention_chunk))


def check_mods(
    batch: int, heads: int, softcap: Any, alibi_slopes: Any, score_mod: Any, mask_mod: Any
) -> None:
    if not isinstance(softcap, (*_INTEGERS, float, torch.SymFloat)):
        refused(errors.bad_softcap(softcap))
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor):
            refused(call_errors.not_a_tensor("alibi_slopes", alibi_slopes))
        if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
            refused(errors.bad_slopes(alibi_slopes, batch, heads))
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not callable(mod):
            refused(call_errors.not_callable(name, mod))


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refused(errors.bad_flag(name, value))


def check_lengths(**lengths: Any) -> None:
    for name, length in lengths.items():
        if not isinstance(length, _INTEGERS) or length < 0:
            refused(errors.bad_length(name, length))


def check_packed(
    cu_q: Tensor,
    cu_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    table: Tensor | None,
) -> None:
    """Shapes and dtypes; values are not read."""
    try:
        check_offsets("cu_seqlens_q", cu_q, cu_q)
        if cu_k is not None or table is None or seqused_k is None:
            check_offsets("cu_seqlens_k", cu_k, cu_q)
        for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
            if used is not None:
                check_numbers(name, used, cu_q)
        if table is not None:
            check_table("block_table", table, cu_q)
    except call_errors.FlexError as error:
        refused(error)


def one_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    """The page table under FlashAttention 2's name or 3's."""
    if block_table is not None and page_table is not None:
        refused(errors.two_tables())
    return page_table if block_table is None else block_table


def splits_option(num_splits: int) -> dict[str, int] | None:
    return {NUM_SPLITS: num_splits} if num_splits else None


def window_of(causal: bool, window_size: tuple[int, int], attention_chunk: int) -> Window:
    # Kernels add to these numbers in int32. No place lies as far off as MOST.
    left, right = (float("inf") if n is None or n < 0 or n >= MOST else int(n) for n in window_size)
    return Window(left, 0 if causal else right, min(attention_chunk, MOST))


def evenly(tokens: Tensor) -> Tensor:
    """Offsets of the sequences of [B, M, ...]."""
    return torch.arange(tokens.size(0) + 1, dtype=torch.int32, device=tokens.device) * tokens.size(1)
