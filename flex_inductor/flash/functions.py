"""Attention of padded and of packed tensors, and what FlashAttention's arguments are here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from ..attention import flex_attention
from ..checks import refused
from ..masks import create_block_mask
from ..masks.window_schedule import schedule_of
from ..sequences import Sequences, varlen_attention
from ..sequences.mask import sequence_mask
from ..softmax import AuxRequest, RngState
from ..visits.window import ALL
from . import errors
from .arguments import (
    PACKED,
    PADDED,
    PAGES,
    check_layout,
    check_lengths,
    check_mods,
    check_packed,
    check_window,
    evenly,
    one_table,
    splits_option,
    window_of,
)
from .descales import Descales

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attention_chunk: int = 0,
    num_splits: int = 0,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    rng_state: RngState | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attend with tensors in FlashAttention's layout.

    What has 8 bits is multiplied by its descale [B, Hk].

    Args:
        q: [B, M, H, D].
        k: [B, N, Hk, D]; Hk divides H.
        v: [B, N, Hk, V].
        dropout_p: the part of the weights that is left out.
        softmax_scale: 1/sqrt(D) by default.
        causal: the last query stands at the last key, and none sees later keys.
        window_size: how many keys before and after its own a query sees; -1 for any.
        softcap: bends scores into (-softcap, softcap); 0 or less for none.
        alibi_slopes: float [H] or [B, H]; this times the distance is taken from scores.
        deterministic: has no effect: CPUs are deterministic, and on GPUs `torch.use_deterministic_algorithms` decides.
        return_attn_probs: return (out, lse, probabilities).
        attention_chunk: queries see keys of their own chunk of so many tokens; 0 for any.
        num_splits: parts into which decoding kernels cut the keys; 0 for any.
        score_mod: after softcap and ALiBi, with positions aligned at the end.
        mask_mod: beside causal, window and chunk, with the same positions.
        sinks: float [H], one more score for each row.
        rng_state: of dropout, as in flex_attention.
        q_descale, k_descale, v_descale: float [B, Hk], for float8 tensors.

    Returns:
        Tensor: [B, M, H, V]; with `return_attn_probs` (out, lse [B, H, M], probabilities). These are None without
        dropout; with it they are [B, H, M, N] before dropout, for tests, with a minus where it leaves them out.

    Raises:
        FlexValueError: shapes, dtypes, devices or options do not fit.
        FlexTypeError: an argument has another type, or a mod takes other arguments or returns something else.

    Example:
        >>> q = torch.randn(1, 2, 8, 16)
        >>> k, v = torch.randn(2, 1, 6, 2, 16)
        >>> flash.flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 2, 8, 16])
        >>> _, lse, _ = flash.flash_attn_func(q * 0, k, v, causal=True, return_attn_probs=True)
        >>> lse[0, 0].exp().round()  # of equal scores, how many keys each query sees
        tensor([5., 6.])
    """
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        check_layout(name, tensor, PADDED)
    check_window(window_size, attention_chunk)
    check_mods(q.size(0), q.size(2), softcap, alibi_slopes, score_mod, mask_mod)
    descales = Descales(q_descale, k_descale, v_descale)
    descales.check(q, k, q.size(0))
    if dropout_p and k.size(1) != q.size(1):
        return _as_sequences(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, attention_chunk=attention_chunk, num_splits=num_splits, score_mod=score_mod,
            mask_mod=mask_mod, sinks=sinks, rng_state=rng_state, **descales._asdict(),
        )  # fmt: skip
    q = descales.on_queries(q, None)
    shift = k.size(1) - q.size(1)
    window = window_of(causal, window_size, attention_chunk)
    mask: Any = None
    if mask_mod is not None:
        aligned = _aligned_mask(mask_mod, shift)
        both = aligned if window == ALL else and_masks(window.mask_mod(shift), aligned)
        mask = create_block_mask(both, q.size(0) or 1, q.size(2) or 1, q.size(1), k.size(1), device=q.device)
    elif window != ALL:
        mask = schedule_of(window, q.size(1), k.size(1), q.device)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    attend = functools.partial(
        flex_attention,
        score_mod=score_mod_of(softcap, alibi_slopes, shift, score_mod),
        block_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
        kernel_options=splits_option(num_splits),
        sinks=sinks,
    )
    request = AuxRequest(lse=True, dropout_mask=return_attn_probs and bool(dropout_p))
    out, aux = attend(q, k, v, dropout_p=dropout_p, rng_state=rng_state, return_aux=request)
    probabilities = None
    if request.dropout_mask:
        places = torch.eye(k.size(2), dtype=k.dtype, device=k.device)
        with torch.no_grad():
            probabilities = attend(q, k, places.expand(*k.shape[:2], -1, -1))
        probabilities = probabilities.where(aux.dropout_mask, -probabilities)
    out = descales.on_output(out.transpose(1, 2), None)
    return (out, aux.lse, probabilities) if return_attn_probs else out


def _as_sequences(q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
    """As one sequence for each batch, whose queries stand at its last keys for dropout as they do for mods."""
    found = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), evenly(q), evenly(k), q.size(1), k.size(1), *args, **more
    )  # fmt: skip
    out, *others = found if isinstance(found, tuple) else (found,)
    out = out.unflatten(0, q.shape[:2])
    if not others:
        return out
    lse, probabilities = others
    return out, lse.unflatten(1, q.shape[:2]).transpose(0, 1), probabilities


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: [B, M, 3, H, D].
        args, kwargs: the other arguments of `flash_attn_func`.

    Returns:
        Tensor: [B, M, H, D], or what `flash_attn_func` returns beside.

    Example:
        >>> flash.flash_attn_qkvpacked_func(torch.randn(2, 10, 3, 4, 8), causal=True).shape
        torch.Size([2, 10, 4, 8])
    """
    check_layout("qkv", qkv, "[batch, length, 3, heads, head_dim]", 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `flash_attn_func` with keys and values in one tensor.

    Args:
        q: [B, M, H, D].
        kv: [B, N, 2, Hk, D].
        args, kwargs: the other arguments of `flash_attn_func`.

    Returns:
        Tensor: [B, M, H, D], or what `flash_attn_func` returns beside.

    Example:
        >>> q, kv = torch.randn(2, 3, 4, 8), torch.randn(2, 10, 2, 2, 8)
        >>> flash.flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 3, 4, 8])
    """
    check_layout("kv", kv, "[batch, length, 2, heads, head_dim]", 2)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    rng_state: RngState | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attend within packed sequences, or with `block_table` to keys in pages.

    Offsets are not read on the host, and so not checked.

    Args:
        q: [T, H, D], the tokens of all sequences.
        k: [S, Hk, D], or pages [pages, page_size, Hk, D].
        v: the same with V in the place of D.
        cu_seqlens_q: int32 [sequences + 1], where each begins in q.
        cu_seqlens_k: the same in k; None with pages and `seqused_k`.
        max_seqlen_q: at least the most queries of a sequence.
        max_seqlen_k: at least the most keys of a sequence.
        block_table: int32 [sequences, most pages].
        page_table: FlashAttention 3's name of `block_table`.
        seqused_q: int32 [sequences], how many queries of each there are.
        seqused_k: the same of keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in `flash_attn_func`.
        attention_chunk, num_splits, sinks, rng_state: as in `flash_attn_func`.
        return_attn_probs: return (out, lse, probabilities).
        score_mod, mask_mod: as in `flash_attn_func`, with the sequence in the place of the batch, and local positions.
        q_descale, k_descale, v_descale: float [sequences, Hk], for float8 tensors.

    Returns:
        Tensor: [T, H, V]; with `return_attn_probs` (out, lse [H, T], probabilities), these as from `flash_attn_func`,
        [sequences, H, max_seqlen_q, max_seqlen_k].

    Raises:
        SequencesError: offsets, lengths or a table have another form.
        FlexValueError: shapes, dtypes, devices or options do not fit.
        FlexTypeError: an argument has another type, or a mod takes other arguments or returns something else.
        FlexNotImplementedError: probabilities of keys in pages are asked for, with dropout.

    Example:
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 10, 2, 8)
        >>> flash.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True).shape
        torch.Size([10, 2, 8])
    """
    table = one_table(block_table, page_table)
    check_packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, table)
    of_keys = PACKED if table is None else PAGES
    for name, tensor, layout in (("q", q, PACKED), ("k", k, of_keys), ("v", v, of_keys)):
        check_layout(name, tensor, layout)
    check_window(window_size, attention_chunk)
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    check_mods(cu_seqlens_q.size(0) - 1, q.size(1), softcap, alibi_slopes, score_mod, mask_mod)
    descales = Descales(q_descale, k_descale, v_descale)
    descales.check(q, k, cu_seqlens_q.size(0) - 1)
    q = descales.on_queries(q, cu_seqlens_q)
    paged = table is not None
    if paged and seqused_k is None and cu_seqlens_k is not None:
        seqused_k = cu_seqlens_k.diff()
    sequences = Sequences.unchecked(
        cu_seqlens_q,
        None if paged else cu_seqlens_k,
        used_q=seqused_q,
        used_k=seqused_k,
        pages=table,
        page_size=k.size(1) if paged else None,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        total_q=q.size(0),
        total_k=0 if paged else k.size(0),
    )
    window = window_of(causal, window_size, attention_chunk)
    mask = sequence_mask(sequences, mask_mod, q.size(1), None, window)
    attend = functools.partial(
        varlen_attention,
        sequences=sequences,
        score_mod=score_mod_of(softcap, alibi_slopes, 0, score_mod),
        block_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
        kernel_options=splits_option(num_splits),
        sinks=sinks,
    )
    request = AuxRequest(lse=True, dropout_mask=return_attn_probs and bool(dropout_p))
    if paged and request.dropout_mask:
        refused(errors.probabilities_of_pages())
    out, aux = attend(q, k, v, dropout_p=dropout_p, rng_state=rng_state, return_aux=request)
    probabilities = None
    if request.dropout_mask and cu_seqlens_k is not None:
        probabilities = out.new_zeros(cu_seqlens_q.size(0) - 1, q.size(1), max_seqlen_q, max_seqlen_k)
        if q.size(0) and k.size(0):
            place, there = _padded(cu_seqlens_k, seqused_k, max_seqlen_k, k)
            places = torch.zeros(k.size(0), max_seqlen_k, dtype=k.dtype, device=k.device)
            column = torch.arange(max_seqlen_k, device=k.device).expand_as(place)
            places = places.index_put((place, column), there.to(k.dtype), accumulate=True)
            with torch.no_grad():
                rows = attend(q, k, places.unsqueeze(1).expand(-1, k.size(1), -1))
            place, there = _padded(cu_seqlens_q, seqused_q, max_seqlen_q, q)
            probabilities = (rows[place] * there[..., None, None]).transpose(1, 2)
            probabilities = probabilities.where(aux.dropout_mask, -probabilities)
    out = descales.on_output(out, cu_seqlens_q)
    return (out, aux.lse, probabilities) if return_attn_probs else out


def _padded(cu: Tensor, used: Tensor | None, longest: int, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of padded sequences [sequences, longest] are in packed ones, and whether they are there."""
    column = torch.arange(longest, device=cu.device)
    there = column < (cu.diff() if used is None else used).unsqueeze(1)
    return (cu[:-1, None] + column).clamp(max=packed.size(0) - 1), there


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """Call `flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: [T, 3, H, D].
        cu_seqlens: int32 [sequences + 1].
        max_seqlen: at least the most tokens of a sequence.
        args, kwargs: the other arguments of `flash_attn_varlen_func`.

    Returns:
        Tensor: [T, H, D], or what `flash_attn_varlen_func` returns beside.

    Example:
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> qkv = torch.randn(10, 3, 2, 8)
        >>> flash.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True).shape
        torch.Size([10, 2, 8])
    """
    check_layout("qkv", qkv, "[tokens, 3, heads, head_dim]", 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: [T, H, D].
        kv: [S, 2, Hk, D].
        cu_seqlens_q: int32 [sequences + 1].
        cu_seqlens_k: int32 [sequences + 1].
        max_seqlen_q: at least the most queries of a sequence.
        max_seqlen_k: at least the most keys of a sequence.
        args, kwargs: the other arguments of `flash_attn_varlen_func`.

    Returns:
        Tensor: [T, H, D], or what `flash_attn_varlen_func` returns beside.

    Example:
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, kv = torch.randn(10, 4, 8), torch.randn(10, 2, 2, 8)
        >>> flash.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7).shape
        torch.Size([10, 4, 8])
    """
    check_layout("kv", kv, "[tokens, 2, heads, head_dim]", 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs
    )


def _aligned_mask(mask_mod: MaskMod, shift: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + shift, kv_idx)


def score_mod_of(softcap: float, slopes: Tensor | None, shift: int, score_mod: Any) -> Any:
    """First the softcap, then ALiBi, then the user's."""
    if softcap <= 0 and slopes is None and (score_mod is None or not shift):
        return score_mod

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_idx = q_idx + shift
        if softcap > 0:
            score = torch.tanh(score / softcap) * softcap
        if slopes is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
            score = score - slope * (q_idx - kv_idx).abs()
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    return mod
