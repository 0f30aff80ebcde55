"""Dense attention, as short as it can be: the specification that every kernel is tested against."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .masks.schedule import schedule_parts
from .op.schedule import schedule_of
from .op.tracing import LaneIndexing


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, logsumexp, max_scores), differentiable by autograd, in the inputs' own dtype."""
    b, h, m, n = (torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2)))
    key, value = (t.expand(query.size(0), -1, -1, -1) for t in (key, value))
    key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    score = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    with LaneIndexing():
        if score_mod is not None:
            score = over_lanes(score_mod, (0,))(score, b, h, m, n)
        if block_mask is not None:
            schedule, mask_mod = schedule_parts(block_mask)
            rows = (slice(0, len(b)), slice(0, len(h)), slice(0, len(m)))
            visited, full = schedule_of(schedule).band(*rows).lanes(slice(0, len(n)))
            live = over_lanes(mask_mod, ())(b, h, m, n)
            live = (live | full) & visited
            score = torch.where(live, score, -math.inf)
    peak = score.amax(-1) if len(n) else score.new_full(score.shape[:3], -math.inf)
    alive = (peak != -math.inf).unsqueeze(-1)
    weight = torch.softmax(torch.where(alive, score, 0.0), -1) * alive
    lse = torch.where(alive.squeeze(-1), torch.logsumexp(torch.where(alive, score, 0.0), -1), -math.inf)
    # A captured tensor of a wider dtype may have promoted the scores.
    return weight.to(value.dtype) @ value, lse, peak


def over_lanes(mod: Any, prefix: tuple) -> Any:
    """`mod` on ranges of b, h, q_idx and kv_idx; `prefix` are the vmap dims of what comes before them."""
    for dims in [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]:
        mod = torch.vmap(mod, in_dims=(*prefix, *dims))
    return mod
