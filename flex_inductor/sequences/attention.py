"""Attention on packed sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import errors as call_errors
from ..checks import check_call, refuse_untested, refused
from ..masks.ordinary import without_gradient_levels
from ..masks.planned import needs_plan
from ..op import Inputs, attention, untraced
from ..options import call_options
from ..softmax import AuxRequest, RngState, Scales, Softmax, answer, asked, dropout_mask
from ..visits.places import COLUMNS, TileMap
from . import errors
from .mask import SequenceMask
from .sequences import TENSORS, Sequences


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: SequenceMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0,  # not 0.0, of which Dynamo may make a symbol
    rng_state: RngState | None = None,
    head_offset: int = 0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Any:
    """Attend within each of many sequences that are packed one after the other.

    Args:
        query: [T, H, D], the tokens of all sequences.
        key: [S, H, D]; fewer heads, dividing H, with `enable_gqa`. For sequences in a cache [rows, length, H, D], in
            pages [pages, page_size, H, D], both without a gradient.
        value: the same with V in the place of D.
        sequences: where each sequence begins.
        score_mod: `score_mod(score, sequence, h, q_idx, kv_idx)`, with positions within the sequence, the last query at
            the last key.
        block_mask: `sequences.mask(mask_mod)`; without one, every query sees all keys of its sequence.
        scale, enable_gqa, return_lse, kernel_options, return_aux, sinks, dropout_p, rng_state, head_offset: as
            flex_attention has them. Dropout sees what score_mod sees, so a sequence loses the same weights wherever it
            is packed. The dropout_mask is [sequences, H, longest queries, longest keys].
        q_scale, k_scale, v_scale: for queries, keys and values of 8 bits: []; of keys and values also for each head
            [H], or for each token, like key without its last dimension.

    Returns:
        Tensor: [T, H, V], in rows that belong to no sequence 0; with `return_lse` (out, logsumexp [H, T]); with
        `return_aux` (out, AuxOutput).

    Raises:
        SequencesError: tensors do not fit the sequences, or the mask is of other sequences.
        FlexValueError: shapes, dtypes, devices or options do not fit.
        FlexTypeError: an argument has another type, or a mod takes other arguments or returns something else.

    Example:
        >>> sequences = Sequences.from_lengths([3, 50, 7])
        >>> query = torch.randn(60, 4, 16)
        >>> mask = sequences.mask(masks.causal())
        >>> out = varlen_attention(query, query, query, sequences, block_mask=mask)
        >>> second = query[3:53]
        >>> alone = varlen_attention(second, second, second, Sequences.from_lengths([50]))
        >>> out.shape, torch.allclose(out[52], alone[-1], atol=1e-6)  # the last token sees all
        (torch.Size([60, 4, 16]), True)
    """
    refuse_untested()
    try:
        if not isinstance(sequences, Sequences):
            raise errors.not_sequences(sequences)
        in_cache = sequences.cu_k is None
        as_op = as_rows if in_cache else as_batch
        _check_ranks(query, {"key": key, "value": value}, sequences)
        by_token = tuple(key.shape[:-1]) if isinstance(key, Tensor) else ()
        query, key, value = as_batch(query), as_op(key), as_op(value)
        first_key, first_value = (t[:1] if isinstance(t, Tensor) else t for t in (key, value))
        options = (scale, return_lse, kernel_options, return_aux)
        untraced(check_call, query, first_key, first_value, enable_gqa, score_mod, *options)
        scales = Scales(q_scale, k_scale, v_scale)
        scales.check(query, key, (key.size(1),), by_token)
        softmax = Softmax(sinks, dropout_p, rng_state, head_offset).drawn(query)
        softmax.check(query)
        _check_sequences(query, key, value, sequences, block_mask)
        if needs_plan():
            raise call_errors.unplanned("varlen_attention")
    except call_errors.FlexError as error:
        refused(error)
    query = scales.widened(query)
    of_rows = scales.of_rows(
        key, lambda s: s.unsqueeze(-1) if s.dim() == 1 else as_op(s.unsqueeze(-1)).squeeze(-1)
    )
    mask = sequences.mask() if block_mask is None else block_mask
    tile_map, key, value, of_rows = located(mask, key, value, of_rows)
    of_softmax = softmax.inputs(query)
    if softmax.dropout_p and sequences.cu_k is sequences.cu_q and sequences.used_k is sequences.used_q:
        of_softmax["in_blocks"] = True  # positions of queries are their places
    wanted = asked(return_aux, return_lse)
    scattered = sequences.pages is not None
    *results, last = attention(
        query,
        key,
        value,
        score_mod,
        mask.mask_mod,
        1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
        Inputs(schedule=mask.visits, tile_map=tile_map, scattered=scattered, **of_softmax, **of_rows),
        call_options(kernel_options, lse=wanted.reads_lse, max_scores=wanted.maxima, more=wanted.more),
    )
    if wanted.column_sums:
        last = last.squeeze(0).transpose(0, 1) if key.size(0) == 1 else last.transpose(1, 2)
        last = last.view(by_token)
    kept = _dropout_mask(softmax, sequences, query) if wanted.dropout_mask else None
    return answer(return_aux, return_lse, (*results, last), softmax, kept, packed=True)


def located(
    mask: SequenceMask, key: Tensor, value: Tensor, of_rows: dict[str, Any]
) -> tuple[TileMap, Tensor, Tensor, dict[str, Any]]:
    """The mask's tiles where keys and values of the op's form lie, and these as kernels read them."""
    tile_map, sequences = mask.tile_map, mask.sequences
    if sequences.cu_k is not None:
        return tile_map, key, value, of_rows
    # A row or a page that is not there is never read.
    batch, row, rest = tile_map.keys.split([1, 1, COLUMNS - 2], 1)
    batch = batch.clamp(0, key.size(0) - 1)
    if sequences.pages is not None and _follow(key) and _follow(value):  # kernels look up one number per key
        batch, row = torch.zeros_like(batch), batch * key.size(2) + row
        key, value = _one_row(key), _one_row(value)
        of_rows = {
            n: tuple(_one_row(s.unsqueeze(-1)).squeeze(-1) for s in both) for n, both in of_rows.items()
        }
    return TileMap(tile_map.queries, torch.cat([batch, row, rest], 1)), key, value, of_rows


def _dropout_mask(softmax: Softmax, sequences: Sequences, query: Tensor) -> Tensor | None:
    len_q, len_k = (places.lengths for places in sequences.places)
    sizes = sequences.count, query.size(1), sequences.max_q, sequences.max_k
    b, h, q, kv = (torch.arange(size, device=query.device) for size in sizes)
    positions = q.view(-1, 1) + (len_k - len_q).view(-1, 1, 1, 1)
    return dropout_mask(softmax, (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), positions, kv), query)


def as_batch(packed: Any) -> Any:
    """[T, H, D] as the one batch [1, H, T, D] that the op has."""
    return packed.transpose(0, 1).unsqueeze(0) if isinstance(packed, Tensor) else packed


def _follow(pages: Tensor) -> bool:
    """Whether the last token of each is followed by the first of the next."""
    return pages.stride(0) == pages.size(2) * pages.stride(2)


def _one_row(pages: Tensor) -> Tensor:
    return pages.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def as_rows(cache: Any) -> Any:
    """[B, S, H, D] as the op has it."""
    return cache.transpose(1, 2) if isinstance(cache, Tensor) else cache


def _check_ranks(query: Any, keys: dict[str, Any], sequences: Sequences) -> None:
    if isinstance(query, Tensor) and query.dim() != 3:
        raise errors.wrong_rank("query", query)
    for name, tensor in keys.items():
        if not isinstance(tensor, Tensor):
            continue
        if sequences.cu_k is not None and tensor.dim() != 3:
            raise errors.wrong_rank(name, tensor)
        if sequences.cu_k is None and (tensor.dim() != 4 or tensor.size(0) == 0):
            raise errors.not_a_cache(name, tensor, sequences.pages is not None)


def _check_sequences(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, block_mask: Any
) -> None:
    if block_mask is not None and not isinstance(block_mask, SequenceMask):
        raise errors.not_a_sequence_mask(block_mask)
    if block_mask is not None and not _same(block_mask.sequences, sequences):
        raise errors.mask_of_others()
    if block_mask is not None and block_mask.heads not in (None, query.size(1)):
        raise errors.mask_heads(block_mask.heads, query.size(1))
    for name, tensor, total in (("query", query, sequences.total_q), ("key", key, sequences.total_k)):
        if tensor.size(2) < total:
            raise errors.too_few_tokens(name, tensor.size(2), total)
    if sequences.device != query.device:
        raise errors.other_device("query", query.device, sequences.device)
    if sequences.cu_k is not None:
        return
    if key.size(0) != value.size(0):
        raise call_errors.key_value_differ(key, value)
    for name, tensor in (("key", key), ("value", value)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise errors.cache_needs_grad(name)
    sequences.check_cache("key", key.size(0), key.size(2))


def _same(one: Sequences, other: Sequences) -> bool:
    """Whether they have the same tensors. A pytree makes other objects of the two, torch.func.grad of the tensors."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in TENSORS]
    if torch.compiler.is_dynamo_compiling():
        return all(a is b for a, b in pairs)
    return all(a is b or _value(a) is _value(b) for a, b in pairs)


def _value(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else without_gradient_levels(tensor)
