"""Dense attention, as short as it can be: the specification that every kernel is tested against.

It imports nothing of the project, so that it shares no mistake with what it judges.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, logsumexp, max_scores), differentiable by autograd, in the inputs' own dtype."""
    b, h, m, n = (torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2)))
    key, value = (t.expand(query.size(0), -1, -1, -1) for t in (key, value))
    key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    score = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if score_mod is not None:
        score = over_lanes(score_mod, (0,))(score, b, h, m, n)
    if block_mask is not None:
        partial, full = (_listed(block_mask, kind, len(m), len(n)).to(m.device) for kind in ("", "full_"))
        live = (over_lanes(block_mask.mask_mod, ())(b, h, m, n) & partial) | full
        score = torch.where(live, score, -math.inf)
    peak = score.amax(-1) if len(n) else score.new_full(score.shape[:3], -math.inf)
    if sinks is not None:  # a key without a value
        column = sinks.to(score.dtype).view(-1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, column], -1)
    alive = (score != -math.inf).any(-1, keepdim=True)
    weight = (torch.softmax(torch.where(alive, score, 0.0), -1) * alive)[..., : len(n)]
    lse = torch.where(alive.squeeze(-1), torch.logsumexp(torch.where(alive, score, 0.0), -1), -math.inf)
    lse = torch.where(peak == math.inf, math.nan, lse)  # like its weights: inf - inf
    # A captured tensor of a wider dtype may have promoted the scores.
    return weight.to(value.dtype) @ value, lse, peak


def over_lanes(mod: Any, prefix: tuple) -> Any:
    """`mod` on ranges of b, h, q_idx and kv_idx; `prefix` are the vmap dims of what comes before them."""

    def lane(*args: Any) -> Any:
        with _IndexingByLanes():
            return mod(*args)

    for dims in [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)]:
        lane = torch.vmap(lane, in_dims=(*prefix, *dims))
    return lane


class _IndexingByLanes(TorchFunctionMode):
    """Lets a mod write `tensor[q_idx]` under vmap, where an index has no value in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__ or not any(map(_is_number, _parts(args[1]))):
            return func(*args, **(kwargs or {}))
        tensor, parts = args[0], _parts(args[1])
        if any(part is ... for part in parts):
            at = next(i for i, part in enumerate(parts) if part is ...)
            named = sum(part is not None for part in parts) - 1
            parts[at : at + 1] = [slice(None)] * (tensor.dim() - named)
        tensor = tensor[tuple(slice(None) if _is_number(part) else part for part in parts)]
        kept = [part for part in parts if not isinstance(part, int)]
        for dim in reversed(range(len(kept))):
            if _is_number(index := kept[dim]):
                index = torch.where(index < 0, index + tensor.size(dim), index)
                tensor = tensor.index_select(dim, index.reshape(1)).squeeze(dim)
        return tensor


def _parts(key: Any) -> list:
    return list(key) if isinstance(key, tuple) else [key]


def _is_number(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype != torch.bool


def _listed(block_mask: Any, kind: str, queries: int, keys: int) -> Tensor:
    """Flags [B or 1, H or 1, queries, keys]: pairs in blocks that a BlockMask or a RunSchedule names.

    `kind` is "full_" for the blocks that are visited whole and "" for the others.
    """
    q_block, kv_block = block_mask.BLOCK_SIZE
    rows, columns = -(-queries // q_block), -(-keys // kv_block)
    blocks = _blocks_in_runs if hasattr(block_mask, "kv_runs") else _blocks_in_lists
    lanes = (
        blocks(block_mask, kind, rows, columns).repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
    )
    return lanes[:, :, :queries, :keys]


def _blocks_in_lists(block_mask: Any, kind: str, rows: int, columns: int) -> Tensor:
    counts, indices = (getattr(block_mask, f"{kind}kv_{name}") for name in ("num_blocks", "indices"))
    if counts is None:
        return torch.zeros(1, 1, rows, columns, dtype=torch.bool)
    shape = (1,) * (3 - counts.dim()) + tuple(counts.shape)
    counts, indices = counts.reshape(shape), indices.reshape(*shape, -1).long()
    listed = torch.arange(indices.size(-1), device=counts.device) < counts.unsqueeze(-1)
    flags = torch.zeros(*shape, columns + 1, dtype=torch.bool, device=counts.device)  # the last is nobody's
    return flags.scatter(-1, torch.where(listed, indices, columns), True)[:, :, :rows, :columns]


def _blocks_in_runs(schedule: Any, kind: str, rows: int, columns: int) -> Tensor:
    offsets, runs = (getattr(schedule, f"{kind}kv_{name}").tolist() for name in ("offsets", "runs"))
    flags = torch.zeros(len(offsets), len(offsets[0]), rows, columns, dtype=torch.bool)
    for b, heads in enumerate(offsets):
        for h, ends in enumerate(heads):
            for row in range(rows):
                for start, stop in runs[ends[row] : ends[row + 1]]:
                    flags[b, h, row, start:stop] = True
    return flags
