"""Attention to keys in a cache, after appending new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import refused
from ..errors import FlexError, not_a_tensor
from ..sequences import Sequences, varlen_attention
from ..sequences.append import check_append, write
from ..sequences.errors import cache_needs_grad, not_a_cache
from ..sequences.mask import sequence_mask
from ..sequences.sequences import check_numbers, check_offsets, check_table
from ..visits.window import ALL
from . import errors
from .arguments import (
    PACKED,
    PADDED,
    check_flag,
    check_layout,
    check_lengths,
    check_mods,
    check_window,
    evenly,
    one_table,
    splits_option,
    window_of,
)
from .descales import Descales
from .functions import MaskMod, score_mod_of


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    attention_chunk: int = 0,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attend to keys in a cache, after new ones are written behind those that are there.

    With `cu_seqlens_q`, q is packed [T, H, D], and so are k and v. No values of tensors are read on the host.

    Args:
        q: [B, M, H, D], or packed.
        k_cache: [rows, length, Hk, D], or pages [pages, page_size, Hk, D].
        v_cache: the same with V in the place of D.
        k: [B, new, Hk, D], or packed: new keys, which are written into the cache in place.
        v: [B, new, Hk, V], or packed.
        rotary_cos: float [positions, R], by which k and q are rotated.
        rotary_sin: the same.
        cache_seqlens: int32 [B] or an integer, how many tokens each sequence has before the new ones; the whole row by
            default.
        cache_batch_idx: int32 [B], the row of each sequence.
        cache_leftpad: int32 [B], with how many tokens of padding a row begins.
        block_table: int32 [B, most pages], the pages of each sequence.
        page_table: FlashAttention 3's name of `block_table`.
        softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits: as in `flash_attn_func`.
        rotary_interleaved: whether neighbours are rotated together, or dimension i with i + R.
        return_softmax_lse: return (out, lse).
        cu_seqlens_q: int32 [B + 1], where each sequence begins in packed q.
        cu_seqlens_k_new: the same in packed k; `cu_seqlens_q` by default.
        max_seqlen_q: at least the most queries of a sequence, for packed q.
        attention_chunk, sinks: as in `flash_attn_func`.
        score_mod, mask_mod: as in `flash_attn_func`, with the sequence in the place of the batch, and local positions.
        q_descale, k_descale, v_descale: float [B, Hk], for float8 tensors.

    Returns:
        Tensor: [B, M, H, V], or [T, H, V] of packed q; with `return_softmax_lse` (out, lse [B, H, M], or [H, T]).

    Raises:
        SequencesError: caches, tables or lengths do not fit, or a cache requires a gradient.
        FlexValueError: shapes, dtypes, devices or options do not fit, or something is given without what belongs to it.
        FlexTypeError: an argument has another type, or a mod takes other arguments or returns something else.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 16, 4, 8)
        >>> q, new = torch.randn(2, 1, 4, 8), torch.ones(2, 1, 4, 8)
        >>> lengths = torch.tensor([3, 9], dtype=torch.int32)
        >>> out = flash.flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, new, new, cache_seqlens=lengths, causal=True)
        >>> out.shape
        torch.Size([2, 1, 4, 8])
        >>> k_cache[:, :, 0, 0].nonzero().tolist()  # where the new keys are
        [[0, 3], [1, 9]]
    """
    packed = cu_seqlens_q is not None
    check_layout("q", q, PACKED if packed else PADDED)
    check_window(window_size, attention_chunk)
    if max_seqlen_q is not None:
        check_lengths(max_seqlen_q=max_seqlen_q)
    check_flag("rotary_interleaved", rotary_interleaved)
    table = one_table(block_table, page_table)
    given = {
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cu_seqlens_k_new": cu_seqlens_k_new,
    }
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    try:
        _check(q, caches, given, cache_seqlens, cache_leftpad, table, packed)
        if cu_seqlens_q is None:
            starts, most = evenly(q), q.size(1)
        elif max_seqlen_q is None:
            raise errors.without_lengths()
        else:
            starts, most = cu_seqlens_q, max_seqlen_q
        check_offsets("cu_seqlens_q", starts, starts)
        if table is not None and not (isinstance(table, Tensor) and table.dim() == 2):
            check_table("block_table", table, starts)  # what fits is checked again once its rows are chosen
        room = k_cache.size(1) * (1 if table is None else table.size(1))
        if table is not None and cache_batch_idx is not None:
            check_numbers("cache_batch_idx", cache_batch_idx, starts)
            table, cache_batch_idx = table.index_select(0, cache_batch_idx), None
        check_mods(starts.size(0) - 1, q.size(-2), softcap, alibi_slopes, score_mod, mask_mod)
        used = _used(cache_seqlens, room, 0 if k is None or packed else k.size(1), starts)
        new = None
        if k is not None and v is not None:
            begins = evenly(k) if k.dim() == 4 else starts if cu_seqlens_k_new is None else cu_seqlens_k_new
            check_offsets("cu_seqlens_k_new", begins, starts)
            used = used + begins.diff()
            new = _packed(k), _packed(v), begins
        numbers = {"cache_seqlens": used, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
        for name, tensor in numbers.items():
            if tensor is not None:
                check_numbers(name, tensor, starts)
        if table is not None:
            check_table("block_table", table, starts)
        sequences = Sequences.unchecked(
            starts,
            None,
            used_k=used,
            left_pad_k=cache_leftpad,
            cache_rows=cache_batch_idx,
            pages=table,
            page_size=None if table is None else k_cache.size(1),
            max_q=most,
            max_k=room,
            total_q=q.size(0) if packed else q.size(0) * q.size(1),
            total_k=0,
        )
        tokens = _packed(q)
        rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
        if new is not None:
            check_append(k_cache, v_cache, *new[:2], sequences, rotary, tokens if rotary else None)
    except FlexError as error:
        refused(error)
    window = window_of(causal, window_size, attention_chunk)
    descales = Descales(q_descale, k_descale, v_descale)
    descales.check(q, k_cache, starts.size(0) - 1)
    if new is not None:
        turned = write(
            k_cache, v_cache, *new[:2], sequences, new[2], None, used, rotary, rotary_interleaved,
            tokens if rotary else None, starts, q_moves=window != ALL,
        )  # fmt: skip
        tokens = turned if rotary else tokens
    mask = sequence_mask(sequences, mask_mod, q.size(-2), None, window)
    out, lse = varlen_attention(
        descales.on_queries(tokens, starts),
        k_cache,
        v_cache,
        sequences,
        score_mod_of(softcap, alibi_slopes, 0, score_mod),
        mask,
        softmax_scale,
        enable_gqa=True,
        return_lse=True,
        kernel_options=splits_option(num_splits),
        sinks=sinks,
    )
    out = descales.on_output(out, starts)
    if not packed:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _check(
    q: Any,
    caches: dict[str, Any],
    given: dict[str, Any],
    cache_seqlens: Any,
    cache_leftpad: Any,
    table: Any,
    packed: bool,
) -> None:
    """What belongs together, and the ranks."""
    for name, cache in caches.items():
        if not isinstance(cache, Tensor) or cache.dim() != 4:
            raise not_a_cache(name, cache, table is not None)
        if torch.is_grad_enabled() and cache.requires_grad:
            raise cache_needs_grad(name)
    for name, other in (("k", "v"), ("v", "k")):
        new = given[name]
        if new is None and given[other] is not None:
            raise errors.half_of_new(name, other)
        if new is not None and not isinstance(new, Tensor):
            raise not_a_tensor(name, new)
        if new is not None and new.dim() != q.dim():
            raise errors.other_rank(name, new, q)
        if new is not None and not packed and new.size(0) != q.size(0):
            raise errors.other_batch(name, new, q.size(0))
    if given["k"] is not None and cache_seqlens is None:
        raise errors.new_without_lengths()
    if given["cu_seqlens_k_new"] is not None and not packed:
        raise errors.offsets_of_padded("cu_seqlens_k_new")
    if (given["rotary_cos"] is None) != (given["rotary_sin"] is None):
        raise errors.half_of_rotary("rotary_cos" if given["rotary_cos"] is None else "rotary_sin")
    if given["rotary_cos"] is not None and given["k"] is None:
        raise errors.rotary_without_new()
    if table is not None and cache_leftpad is not None:
        raise errors.padded_pages()


def _packed(tokens: Tensor) -> Tensor:
    return tokens if tokens.dim() == 3 else tokens.flatten(0, 1)


def _used(cache_seqlens: int | Tensor | None, room: int, new: int, starts: Tensor) -> Any:
    """How many tokens each sequence has before `new` ones."""
    if new > room:
        raise errors.too_long("k", new, room)
    if isinstance(cache_seqlens, Tensor):
        check_numbers("cache_seqlens", cache_seqlens, starts)
        return cache_seqlens
    length = room if cache_seqlens is None else cache_seqlens
    if type(length) is not int or length < 0:
        raise errors.not_lengths("cache_seqlens", length, starts.numel() - 1)
    if length > room - new:
        raise errors.too_long("cache_seqlens", length + new, room)
    return torch.full((starts.numel() - 1,), length, dtype=torch.int32, device=starts.device)
