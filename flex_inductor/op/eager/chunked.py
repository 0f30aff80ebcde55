"""Attention in chunks with an online softmax: the route that serves every device, dtype and mod.

Memory is bounded: see `tiles.py`. Blocks that the schedule leaves out are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...mod_ir.arguments import score_dtype
from ...mod_ir.split import Programs
from ...softmax import COLUMN_SUMS, entropy_with_sinks, with_sinks
from ..call import QKV, Inputs
from ..layout import empty_like_layout
from .lanes import Accumulators
from .tiles import run_of

LAST = torch.iinfo(torch.int64).max
# What a row that sees no key has.
NOTHING = {
    "out": 0.0,
    "lse": -math.inf,
    "max_scores": -math.inf,
    "entropy": 0.0,
    "max_indices": -1,
    COLUMN_SUMS: 0.0,
}
SERVES = {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "partial", COLUMN_SUMS}
SERVES |= {"sinks", "dropout", "in_blocks", "kv_scales", "grad_entropy"}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Inputs,
    mods: Programs,
    scale: float,
    more: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """Output, logsumexp and row maximum (both in natural logarithm), and what `more` names."""
    out, lse, row_max, *further = empty_outputs(query, value, inputs.partial, more)
    known = dict(zip(more, further, strict=True))
    run = run_of(query, key, value, inputs, mods, scale, (value,))
    if inputs.tile_map is not None:  # a map may leave rows out
        out.zero_(), lse.fill_(-math.inf), row_max.fill_(-math.inf)
        for name, tensor in known.items():
            tensor.fill_(NOTHING[name])
    for rows in run.row_tiles():
        acc = run.zeros(rows, value.size(-1))
        total = run.zeros(rows, 1)
        peak = torch.full_like(total, -math.inf)
        weighted, largest = torch.zeros_like(total), torch.full_like(total, -1, dtype=torch.int64)
        for tile, _, score, live in run.score_tiles(rows, run.scaled_query(rows)):
            if live is not None:
                score = torch.where(live, score, -math.inf)
            top = score.amax(-1, keepdim=True)
            if "max_indices" in more:
                index = torch.where(score == top, run.indices(tile)["kv_idx"].long(), LAST).amin(-1, True)
                largest = torch.where((top > peak) | ((top == peak) & (index < largest)), index, largest)
            new_peak = torch.maximum(peak, top)
            safe_peak = torch.where(new_peak == -math.inf, 0.0, new_peak)
            change = peak - safe_peak
            shrink = change.exp()
            weight = (score - safe_peak).exp_()
            if "entropy" in more:
                # The bound keeps 0 times it 0.
                weighted = weighted.addcmul_(total, change.clamp(min=-1e30)).mul_(shrink)
                weighted -= torch.special.entr(weight).sum(-1, keepdim=True)
            total = total.mul_(shrink).add_(weight.sum(-1, keepdim=True))
            weight = run.dropped(tile, weight)
            acc = acc.mul_(shrink).add_(run.per_query_head(weight, run.value(tile), live))
            peak = new_peak
        safe_total = torch.where(total == 0, 1.0, total)
        result, row_lse = acc / safe_total, (peak + total.log()).squeeze(-1)
        found = {"max_indices": largest.squeeze(-1)}
        if "entropy" in more:
            found["entropy"] = (safe_total.log() - weighted / safe_total).squeeze(-1)
        if inputs.sinks is not None:
            batches = rows.b if inputs.sinks.size(0) > 1 else slice(0, 1)
            sinks = inputs.sinks[batches, rows.h]
            if "entropy" in more:
                found["entropy"] = entropy_with_sinks(found["entropy"], row_lse, sinks)
            result, row_lse = with_sinks(result, row_lse, sinks)
        at = rows.b, rows.h, rows.m
        out[at] = result.to(out.dtype)
        lse[at] = row_lse
        row_max[at] = peak.squeeze(-1)
        for name, tensor in known.items():
            if name != COLUMN_SUMS:
                tensor[at] = found[name]
    if COLUMN_SUMS in known:
        known[COLUMN_SUMS].copy_(_column_sums(query, key, lse, inputs, mods, scale))
    return out, lse, row_max, *further


def _column_sums(
    query: Tensor, key: Tensor, lse: Tensor, inputs: Inputs, mods: Programs, scale: float
) -> Tensor:
    """The sum of each key's weights: the gradient of values of one number each, where that of every output is 1."""
    value, of_rows = key.new_ones((*key.shape[:3], 1)), query.new_ones((*query.shape[:3], 1))
    inputs = inputs._replace(in_blocks=False, dropout=None, partial=True)
    given = (query, key, value, of_rows, lse, of_rows, None)
    grads: Any = backward(*given, inputs, mods._replace(joint=None), scale, ("value",))
    return grads[2].squeeze(-1)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    inputs: Inputs,
    mods: Programs,
    scale: float,
    wants: Sequence[str],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Gradients of query, key and value (those that `wants` names) and of every captured tensor."""
    factors = (query, key) if grad_out is None else (query, key, grad_out)
    run = run_of(query, key, value, inputs, mods, scale, factors)
    d_query, d_key, d_value = (
        empty_like_layout(t, t.shape, run.dtype).zero_() if name in wants else None
        for name, t in zip(QKV, (query, key, value), strict=True)
    )
    captures = inputs.score_captures
    leaves = Accumulators(mods.joint, captures, run.dtype, query.device) if mods.joint else None
    for rows in run.row_tiles():
        row_lse = lse[rows.b, rows.h, rows.m].unsqueeze(-1)
        row_lse = torch.where(row_lse == -math.inf, math.inf, row_lse)  # no lane of a dead row has weight
        d_out = run.zeros(rows, value.size(-1)) if grad_out is None else run.rows(grad_out, rows)
        delta = (d_out * run.rows(out, rows)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[rows.b, rows.h, rows.m].unsqueeze(-1)
        scaled_query = run.scaled_query(rows)
        for tile, raw, score, live in run.score_tiles(rows, scaled_query):
            weight = (score - row_lse).exp_()
            dead = None if live is None else ~live
            if dead is not None:
                weight.masked_fill_(dead, 0.0)
            if d_value is not None:
                run.add_per_kv_head(d_value, tile, run.dropped(tile, weight), d_out, live)
            d_weight = run.dropped(tile, run.per_query_head(d_out, run.value(tile).transpose(-1, -2)))
            d_score = d_weight.sub_(delta).mul_(weight)
            if inputs.grad_entropy is not None:
                grad_entropy = inputs.grad_entropy[rows.b, rows.h, rows.m].unsqueeze(-1)
                d_score += torch.special.entr(weight) * grad_entropy
            if leaves is not None:
                d_score = leaves.add(run.indices(tile), raw, d_score, live)
            if dead is not None:
                d_score = d_score.masked_fill(dead, 0.0)
            if d_query is not None:
                d_query[tile.b, tile.h, tile.m] += run.per_query_head(d_score, run.key(tile), live) * scale
            if d_key is not None:
                run.add_per_kv_head(d_key, tile, d_score, scaled_query, live)
    grads = [
        None if grad is None else grad.to(score_dtype(like.dtype) if inputs.partial else like.dtype)
        for grad, like in zip((d_query, d_key, d_value), (query, key, value), strict=True)
    ]
    captured = leaves.gradients() if leaves is not None else (None,) * len(captures)
    return grads[0], grads[1], grads[2], captured


def empty_outputs(
    query: Tensor, value: Tensor, partial: bool = False, more: Sequence[str] = ()
) -> tuple[Tensor, ...]:
    """Unfilled output (in the query's memory layout), logsumexp, row maximum, and what `more` names."""
    rows = query.shape[:3]
    dtype = score_dtype(query.dtype)
    out = empty_like_layout(query, (*rows, value.size(-1)), dtype if partial else None)
    shapes = [rows, rows, *(value.shape[:3] if name == COLUMN_SUMS else rows for name in more)]
    dtypes = [dtype, dtype, *(torch.int64 if name == "max_indices" else dtype for name in more)]
    return out, *(query.new_empty(shape, dtype=of) for shape, of in zip(shapes, dtypes, strict=True))


def empty_gradients(
    qkv: Sequence[Tensor], inputs: Inputs, wants: Sequence[str], wanted_captures: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """The results of `backward`, unfilled."""
    query, key, value = (
        empty_like_layout(t, t.shape, score_dtype(t.dtype) if inputs.partial else None)
        if name in wants
        else None
        for name, t in zip(QKV, qkv, strict=True)
    )
    captures = zip(inputs.score_captures, wanted_captures, strict=True)
    return (
        query,
        key,
        value,
        tuple(
            torch.empty(c.shape, dtype=c.dtype, device=c.device) if wanted else None for c, wanted in captures
        ),
    )
