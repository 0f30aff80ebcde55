"""Attention in chunks with an online softmax: the route that serves every device, dtype and mod.

Memory is bounded by CHUNK_ELEMENTS scores at a time. What the schedule rules out is not computed.
Also here: the two functional ops that compiled code calls, with mods given as text.

    B batch  H query heads  K key/value heads  G = H / K  M queries  N keys  D, V head dims
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey

from .layout import empty_like_layout
from .program import AXES, LaneProgram, Leaf
from .schedule import BlockMap
from .tracing import INDEX_DTYPE, score_dtype

CHUNK_ELEMENTS = 1 << 21
MAX_CHUNK_KEYS = 1024
MAX_CHUNK_QUERIES = 512


class Mods(NamedTuple):
    """Both mods of a call as programs, with the captured tensors each takes."""

    score: LaneProgram | None  # None where the score is used as it is
    mask: LaneProgram | None  # None where every lane is live
    score_captures: tuple[Tensor, ...]
    mask_captures: tuple[Tensor, ...]


class _Tile(NamedTuple):
    """A chunk of scores: ranges of batches, KV heads, queries and keys."""

    b: slice
    k: slice
    h: slice
    m: slice
    n: slice


def forward(
    query: Tensor, key: Tensor, value: Tensor, lists: BlockMap | None, mods: Mods, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logsumexp and row maximum (both in natural logarithm)."""
    out, lse, row_max = empty_outputs(query, value)
    run = _Run(query, key, value, lists, mods, scale)
    for rows in run.row_tiles():
        acc = query.new_zeros((*run.shape(rows), value.size(-1)), dtype=run.dtype)
        total = query.new_zeros(run.shape(rows), dtype=run.dtype)
        peak = torch.full_like(total, -math.inf)
        for tile in run.tiles(rows):
            score, _, _ = run.scores(tile)
            new_peak = torch.maximum(peak, score.amax(-1))
            safe_peak = torch.where(new_peak == -math.inf, 0.0, new_peak)
            shrink = torch.exp(peak - safe_peak)
            weight = (score - safe_peak.unsqueeze(-1)).exp_()
            total = total * shrink + weight.sum(-1)
            acc = acc * shrink.unsqueeze(-1) + run.per_query_head(weight, run.value(tile))
            peak = new_peak
        out[rows.b, rows.h, rows.m] = (acc / torch.where(total == 0, 1.0, total).unsqueeze(-1)).to(out.dtype)
        lse[rows.b, rows.h, rows.m] = peak + total.log()
        row_max[rows.b, rows.h, rows.m] = peak
    return out, lse, row_max


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    lists: BlockMap | None,
    mods: Mods,
    joint: LaneProgram | None,
    scale: float,
    wants: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Gradients of query, key and value (those that `wants` names) and of every captured tensor."""
    run = _Run(query, key, value, lists, mods, scale)
    d_query, d_key, d_value = (
        torch.zeros(t.shape, dtype=run.dtype, device=t.device) if want else None
        for t, want in zip((query, key, value), wants, strict=True)
    )
    leaves = _Accumulators(joint, mods.score_captures, run.dtype, query.device) if joint else None
    for rows in run.row_tiles():
        row_lse = lse[rows.b, rows.h, rows.m].unsqueeze(-1)
        dead = row_lse == -math.inf
        row_lse = torch.where(dead, 0.0, row_lse)
        d_out = run.zeros(rows, value.size(-1)) if grad_out is None else run.rows(grad_out, rows)
        delta = (d_out * run.rows(out, rows)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[rows.b, rows.h, rows.m].unsqueeze(-1)
        for tile in run.tiles(rows):
            score, raw, live = run.scores(tile)
            weight = torch.where(dead, 0.0, (score - row_lse).exp_())
            if d_value is not None:
                run.add_per_kv_head(d_value, tile, weight, d_out)
            d_score = weight * (run.per_query_head(d_out, run.value(tile).transpose(-1, -2)) - delta)
            if leaves is not None:
                d_score = leaves.add(run, tile, raw, d_score, live)
            if live is not None:
                d_score = torch.where(live, d_score, 0.0)
            if d_query is not None:
                d_query[tile.b, tile.h, tile.m] += run.per_query_head(d_score, run.key(tile)) * scale
            if d_key is not None:
                run.add_per_kv_head(d_key, tile, d_score, run.rows(query, tile) * scale)
    grads = [
        None if grad is None else empty_like_layout(like, like.shape).copy_(grad)
        for grad, like in zip((d_query, d_key, d_value), (query, key, value), strict=True)
    ]
    captured = leaves.gradients() if leaves is not None else (None,) * len(mods.score_captures)
    return grads[0], grads[1], grads[2], captured


def empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled output (in the query's memory layout), logsumexp and row maximum."""
    rows = query.shape[:3]
    out = empty_like_layout(query, (*rows, value.size(-1)))
    dtype = score_dtype(query.dtype)
    return out, query.new_empty(rows, dtype=dtype), query.new_empty(rows, dtype=dtype)


class _Run:
    """One call's tensors, cut into tiles."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, lists: BlockMap | None, mods: Mods, scale: float
    ):
        self.query, self.kv, self.scale, self.mods, self.lists = query, (key, value), scale, mods, lists
        self.dtype = score_dtype(query.dtype)
        self.batch, self.heads, self.queries, _ = query.shape
        self.kv_heads, self.keys = key.shape[1:3]
        self.group = self.heads // max(self.kv_heads, 1)
        self.score_invariants = mods.score.prologue(*mods.score_captures) if mods.score else ()
        self.mask_invariants = mods.mask.prologue(*mods.mask_captures) if mods.mask else ()

    def row_tiles(self) -> Iterator[_Tile]:
        """Tiles of batches, heads and queries; each is walked along the keys."""
        if 0 in (self.batch, self.heads, self.queries):
            return
        keys = min(max(self.keys, 1), MAX_CHUNK_KEYS)
        queries = max(1, min(self.queries, MAX_CHUNK_QUERIES, CHUNK_ELEMENTS // (keys * self.group)))
        kv_heads = max(1, min(self.kv_heads, CHUNK_ELEMENTS // (keys * queries * self.group)))
        batches = max(1, min(self.batch, CHUNK_ELEMENTS // (keys * queries * self.group * kv_heads)))
        for b in _ranges(self.batch, batches):
            for k in _ranges(self.kv_heads, kv_heads):
                h = slice(k.start * self.group, k.stop * self.group)
                for m in _ranges(self.queries, queries):
                    yield _Tile(b, k, h, m, slice(0, self.keys))

    def tiles(self, rows: _Tile) -> Iterator[_Tile]:
        """The tiles of `rows` that the schedule does not rule out."""
        for n in _ranges(self.keys, MAX_CHUNK_KEYS):
            tile = rows._replace(n=n)
            if self.lists is None or self.lists.visits(tile.b, tile.h, tile.m, tile.n):
                yield tile

    def shape(self, tile: _Tile) -> tuple[int, int, int]:
        return (_length(tile.b), _length(tile.h), _length(tile.m))

    def zeros(self, tile: _Tile, width: int) -> Tensor:
        return self.query.new_zeros((*self.shape(tile), width), dtype=self.dtype)

    def rows(self, tensor: Tensor, tile: _Tile) -> Tensor:
        return tensor[tile.b, tile.h, tile.m].to(self.dtype)

    def key(self, tile: _Tile) -> Tensor:
        return self._of_kv(self.kv[0], tile)

    def value(self, tile: _Tile) -> Tensor:
        return self._of_kv(self.kv[1], tile)

    def _of_kv(self, tensor: Tensor, tile: _Tile) -> Tensor:
        b = tile.b if tensor.size(0) == self.batch else slice(None)
        return tensor[b, tile.k, tile.n].to(self.dtype)

    def per_query_head(self, left_BHMx: Tensor, right_BKxy: Tensor) -> Tensor:
        """Every query head times what its KV head holds, without repeating the latter."""
        b, h, m, x = left_BHMx.shape
        folded = left_BHMx.reshape(b, h // self.group, self.group * m, x) @ right_BKxy
        return folded.view(b, h, m, right_BKxy.size(-1))

    def add_per_kv_head(self, into_BKNy: Tensor, tile: _Tile, left_BHMN: Tensor, right_BHMy: Tensor) -> None:
        """into += left^T @ right, summed over the query heads of each KV head."""
        b, h, m, n = left_BHMN.shape
        fold = (b, h // self.group, self.group * m)
        product = left_BHMN.reshape(*fold, n).transpose(-1, -2) @ right_BHMy.reshape(*fold, -1)
        if into_BKNy.size(0) != self.batch:
            into_BKNy[:, tile.k, tile.n] += product.sum(0, keepdim=True)
        else:
            into_BKNy[tile.b, tile.k, tile.n] += product

    def scores(self, tile: _Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores after both mods, before them, and which lanes are live (None for all)."""
        raw = self.per_query_head(self.rows(self.query, tile), self.key(tile).transpose(-1, -2)) * self.scale
        live = self.live(tile)
        score = raw
        if self.mods.score is not None:
            program, captures = self.mods.score, self.mods.score_captures
            lanes = {"score": raw, **self.indices(tile)}
            (score,) = run_lanes(program, lanes, live, captures, self.score_invariants)
            score = score.to(self.dtype)
        if live is not None:
            score = torch.where(live, score, -math.inf)
        return score, raw, live

    def live(self, tile: _Tile) -> Tensor | None:
        """Which lanes both the schedule and mask_mod leave, as a tensor that broadcasts."""
        visited, full = (None, None) if self.lists is None else self.lists.tokens(tile.b, tile.h, tile.m, tile.n)
        if self.mods.mask is None:
            return visited
        program, captures = self.mods.mask, self.mods.mask_captures
        (live,) = run_lanes(program, self.indices(tile), None, captures, self.mask_invariants)
        if full is not None:
            live = live | full
        return live if visited is None else live & visited

    def indices(self, tile: _Tile) -> dict[str, Tensor]:
        return {
            axis: torch.arange(at.start, at.stop, dtype=INDEX_DTYPE, device=self.query.device)
            for axis, at in zip(AXES, (tile.b, tile.h, tile.m, tile.n), strict=True)
        }


def run_lanes(
    program: LaneProgram,
    lanes: dict[str, Tensor],
    live: Tensor | None,
    captures: Sequence[Tensor],
    invariants: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The lane program on every lane of a tile: results have the shape [b, h, q_idx, kv_idx]."""
    varies = [(name,) if name in AXES else AXES for name in program.lanes] + list(program.guards)
    shape = [lanes[axis].numel() for axis in AXES]
    guards = [_reduce_to(live, axes, shape, lanes["b"].device) for axes in program.guards]
    fixed = (None,) * (len(captures) + len(invariants))
    function = program.lane
    for axis in reversed(AXES):
        in_dims = tuple(0 if axis in axes else None for axes in varies) + fixed
        function = torch.vmap(function, in_dims=in_dims)
    with _vmap_allowed():
        return function(*(lanes[name] for name in program.lanes), *guards, *captures, *invariants)


_VMAP_KEYS = (
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchBatchedDecomposition,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchVmapMode,
)


def _vmap_allowed() -> Any:
    """Undoes what keeps torch.vmap from working inside a TorchDispatchMode, where this may be called."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _VMAP_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _reduce_to(live: Tensor | None, axes: Sequence[str], shape: Sequence[int], device: torch.device) -> Tensor:
    """Whether any lane is live, for each position along `axes`."""
    if live is None:
        return torch.ones([n for n, axis in zip(shape, AXES, strict=True) if axis in axes], dtype=torch.bool, device=device)
    live = live.expand(shape)
    for dim in reversed([dim for dim, axis in enumerate(AXES) if axis not in axes]):
        live = live.any(dim)
    return live


class _Accumulators:
    """Sums what lanes contribute to captured tensors; the order of additions is fixed on CPU."""

    def __init__(self, joint: LaneProgram, captures: Sequence[Tensor], dtype: torch.dtype, device: torch.device):
        self.joint, self.captures = joint, captures
        self.invariants = joint.prologue(*captures)
        self.sums: list[Tensor | None] = []
        self.shapes: list[list[int]] = []
        for leaf in joint.leaves:
            sizes = zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            self.shapes.append([self.invariants[size] if invariant else size for size, invariant in sizes])
            flat = torch.zeros(math.prod(self.shapes[-1]), dtype=dtype, device=device)
            self.sums.append(flat if leaf.indices else None)

    def add(self, run: _Run, tile: _Tile, raw: Tensor, d_score: Tensor, live: Tensor | None) -> Tensor:
        """Run the joint graph on a tile: returns d(raw score), adds up d(captures)."""
        lanes = {"score": raw, "grad_score": d_score, **run.indices(tile)}
        d_raw, *rest = run_lanes(self.joint, lanes, live, self.captures, self.invariants)
        for i, leaf in enumerate(self.joint.leaves):
            contribution, indices, rest = rest[0], rest[1 : 1 + leaf.indices], rest[1 + leaf.indices :]
            if live is not None:
                mask = live.reshape(*live.shape, *(1,) * (contribution.dim() - 4))
                contribution = torch.where(mask, contribution, 0.0)
            if leaf.indices:
                self._scatter(i, leaf, indices, contribution, live)
            else:
                total = contribution.sum((0, 1, 2, 3))
                self.sums[i] = total if self.sums[i] is None else self.sums[i] + total
        return d_raw.to(raw.dtype)

    def _scatter(self, i: int, leaf: Leaf, indices: Sequence[Tensor], value: Tensor, live: Tensor | None) -> None:
        still = [dim for dim, axis in enumerate(AXES) if axis not in leaf.axes]
        if still:
            value = value.sum(still, keepdim=True)
        flat = torch.zeros((), dtype=torch.int64, device=value.device)
        for index, size in zip(indices, self.shapes[i], strict=True):
            for dim in still:
                index = index.narrow(dim, 0, 1)
            index = index.to(torch.int64)
            flat = flat * size + torch.where(index < 0, index + size, index)
        if live is not None:
            flat = torch.where(live.any(still, keepdim=True) if still else live, flat, 0)
        self.sums[i].index_add_(0, flat.expand(value.shape).reshape(-1), value.reshape(-1).to(self.sums[i].dtype))

    def gradients(self) -> tuple[Tensor | None, ...]:
        sums = [
            None if total is None else total.view(shape)
            for total, shape in zip(self.sums, self.shapes, strict=True)
        ]
        grads = self.joint.epilogue(*sums, *self.captures, *self.invariants)
        return tuple(
            None if grad is None else grad.to(capture.dtype).expand(capture.shape).contiguous()
            for grad, capture in zip(grads, self.captures, strict=True)
        )


def _ranges(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _length(at: slice) -> int:
    return at.stop - at.start
