"""Queries that all ranks have, and keys spread over ranks: partial results are merged by their logsumexp."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import check_options, check_tensors, refuse_untested, refused
from ..errors import FlexError
from ..op import Inputs, attention, untraced
from ..options import call_options
from ..softmax import Softmax, with_sinks
from . import errors
from .exchange import waited


def merge(out: Tensor, lse: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Attention to the keys of all ranks, given that to each rank's own. The same bits on all of them."""
    both = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
    # In one dimension Inductor cannot choose another layout.
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(both.flatten(), ranks, group)
    gathered = waited(gathered, group).view(ranks, *both.shape)
    parts, of_parts = gathered[..., :-1], gathered[..., -1]
    total = of_parts.logsumexp(0)
    weights = torch.where(total == -math.inf, 0.0, of_parts).softmax(0)
    return (parts * weights.unsqueeze(-1)).sum(0).to(out.dtype), total


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    mask_mod: Any,
    positions: Tensor,
    at: Tensor,
    scale: float | None,
    enable_gqa: bool,
    ranks: int,
    group: str,
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    """See ContextParallel.decode."""
    refuse_untested()
    try:
        untraced(check_tensors, query, key, value, enable_gqa)
        untraced(check_options, query, score_mod, scale, False, None, None)
        softmax.check(query)
        _check(query, key, value, positions, at)
    except FlexError as error:
        refused(error)
    # As mod_ir's `score_dtype`, into which Dynamo does not trace.
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if key.size(2):
        out, lse, _ = attention(
            query,
            key,
            value,
            None if score_mod is None else _placed(score_mod, positions, at),
            _filled(mask_mod, positions, at),
            1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
            Inputs(partial=wide != query.dtype),
            call_options(None, lse=True, max_scores=False),
        )
        if out.requires_grad:
            refused(errors.no_gradient("decode", "a tensor that score_mod looks up"))
    else:
        out = query.new_zeros((*query.shape[:3], value.size(3)), dtype=wide)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=wide)
    out, lse = merge(out, lse, ranks, group)
    if softmax.sinks is not None:
        out, lse = with_sinks(out, lse, softmax.inputs(query)["sinks"])
    return out.to(query.dtype), lse


def _placed(score_mod: Any, positions: Tensor, at: Tensor) -> Any:
    def placed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, _position(at, b, q_idx), _position(positions, b, kv_idx))

    return placed


def _filled(mask_mod: Any, positions: Tensor, at: Tensor) -> Any:
    def filled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = _position(positions, b, kv_idx)
        if mask_mod is None:
            return position >= 0
        return (position >= 0) & mask_mod(b, h, _position(at, b, q_idx), position.clamp(min=0))

    return filled


def _position(positions: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return positions[index] if positions.dim() == 1 else positions[b, index]


def _check(query: Tensor, key: Tensor, value: Tensor, positions: Any, at: Any) -> None:
    batch = query.size(0)
    for name, given, length in (("positions", positions, key.size(2)), ("at", at, query.size(2))):
        is_index = isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64)
        if not is_index or tuple(given.shape) not in ((length,), (batch, length)):
            raise errors.bad_positions(name, given, batch, length)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise errors.no_gradient("decode", "query, key or value")
