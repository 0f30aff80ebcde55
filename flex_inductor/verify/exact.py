"""Attention in float64, and how far from it a right kernel may be.

A kernel rounds in few places, and each bound is made of what is rounded there:

    scores    sums over head_dim in fp32, then what score_mod makes of scores that are off by that much
    weights   exp turns an absolute error of a score into a relative error of its weight
    products  weights and gradients of scores enter them in the inputs' dtype, each rounded by itself: such errors
              add up like the root of the sum of squares. Equal scores round alike, so the sum of their errors is
              found by rounding them
    sums      in fp32
    results   rounded once, to their own dtype

So each element has its own bound: small where little was summed, large where scores are large.

    b, h, m, n  ranges of batches, query heads, queries and keys: a tile
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..mod_ir.arguments import INDEX_DTYPE, score_dtype
from ..mod_ir.program import AXES
from ..visits import BlockRuns, Bounds
from .bounded import OPERATIONS, Bounded, Scores, finite, size_of
from .dropout import factors
from .lanes import Visited
from .leaves import Leaves
from .mods import Mod, apart

LANES, KEYS = 1 << 17, 512  # of a tile: in float64 it fits a cache, and half of a causal mask is left out
OF_ROWS = ("lse", "max_scores", "entropy", "max_indices")
# Errors of products: so many standard deviations. One rounding has a standard deviation of at most 0.6 of its bound.
SPREAD = 6
TINY = 2.0**-120  # a weight below may be 0


class Region(NamedTuple):
    """Ranges of batches, heads, queries and keys to look at."""

    b: slice
    h: slice
    m: Sequence[slice]
    n: Sequence[slice]


class _Tile(NamedTuple):
    b: slice
    h: slice
    m: slice
    n: slice


class Units(NamedTuple):
    """The roundings of a call."""

    scores: float  # eps of scores and sums
    operands: float  # of a product of two operands, where reading them rounds
    weights: float  # half an eps of what weights are rounded to
    least: float  # half of the smallest number above 0 that they may be rounded to

    @staticmethod
    def of(query: Tensor, key: Tensor) -> Units:
        finfo, scores = torch.finfo(query.dtype), torch.finfo(score_dtype(query.dtype)).eps
        least = finfo.tiny * finfo.eps / 2
        fp32 = query.is_cuda and query.dtype == torch.float32
        if fp32 and compat.allows_tf32():
            return Units(scores, 2.0**-10, 2.0**-11, least)
        if key.dtype != query.dtype and finfo.bits == 16:  # narrow keys and values, which scales round
            return Units(scores, finfo.eps / 2, finfo.eps, least)
        return Units(scores, 0.0, finfo.eps / 2, least)


class Exact:
    """One call, tile by tile."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        schedule: BlockRuns | Bounds | None,
        score_mod: Mod | None,
        mask_mod: Mod | None,
        scale: float,
        sinks: Tensor | None = None,
        dropout: Tensor | None = None,
    ):
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.sinks, self.dropout = sinks, dropout
        self.visited = None
        if isinstance(schedule, BlockRuns):
            self.visited = Visited(schedule, -(-key.size(2) // schedule.kv_block), query.device)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.dtype = score_dtype(query.dtype)
        self.units = Units.of(query, key)
        self.group = query.size(1) // max(key.size(1), 1)
        self.sizes = dict(zip(AXES, (*query.shape[:3], key.size(2)), strict=True))

    # Tiles.

    def tiles(self, region: Region) -> Iterator[_Tile]:
        if 0 in self.sizes.values():
            return
        for n in region.n:
            for m in region.m:
                keys, rows = _length(n), _length(m)
                step = max(1, min(rows, LANES // keys))
                heads = max(1, min(_length(region.h), LANES // (step * keys)))
                batches = max(1, min(_length(region.b), LANES // (heads * step * keys)))
                for b in _cut(region.b, batches):
                    for h in _cut(region.h, heads):
                        for part in _cut(m, step):
                            yield _Tile(b, h, part, n)

    def rows(self, tensor: Tensor, tile: _Tile) -> Tensor:
        return tensor[tile.b, tile.h, tile.m].double()

    def of_keys(self, tensor: Tensor, tile: _Tile) -> Tensor:
        """What the KV head of each query head has: [b, h, n, x]."""
        b = tile.b if tensor.size(0) == self.query.size(0) else slice(None)
        return tensor[b, :, tile.n].index_select(1, self.kv_heads(tile)).double()

    def kv_heads(self, tile: _Tile) -> Tensor:
        return torch.arange(tile.h.start, tile.h.stop, device=self.query.device) // self.group

    def indices(self, tile: _Tile) -> dict[str, Tensor]:
        return {
            axis: torch.arange(at.start, at.stop, dtype=INDEX_DTYPE, device=self.query.device)
            for axis, at in zip(AXES, tile, strict=True)
        }

    def live(self, tile: _Tile) -> Tensor:
        return self.allowed(tile, None if self.visited is None else self.visited.lanes(*tile))

    def allowed(self, tile: _Tile, blocks: tuple[Tensor, Tensor] | None) -> Tensor:
        """The lanes in visited blocks that mask_mod lets through; it is not asked in full ones.

        `blocks` are flags for lanes in visited and in full ones.
        """
        partial = None if blocks is None else blocks[0] & ~blocks[1]
        live = torch.ones((), dtype=torch.bool, device=self.query.device)
        if self.mask_mod is not None:
            (live,) = self.mask_mod.rounded(self.indices(tile), partial, self.dtype)
        if blocks is not None:
            visited, full = blocks
            live = visited & (full | live)
        return live.expand([_length(at) for at in tile])

    # Scores.

    def scores(self, tile: _Tile) -> Scores:
        query, key = self.rows(self.query, tile) * self.scale, self.of_keys(self.key, tile)
        live = self.live(tile)
        raw = query @ key.transpose(-1, -2)
        off = self._of_products(query, key)
        if self.score_mod is None:
            value, low, high = raw, raw - off, raw + off
            rounding = raw.abs()
        else:
            lanes = {"score": raw, **self.indices(tile)}
            (value,) = self.score_mod.exact(lanes, live)
            ends = [self.score_mod.exact({**lanes, "score": raw + by}, live)[0] for by in (off, -off)]
            ((_, error),) = self.score_mod.error(lanes, live, self.dtype, [value])
            value, *ends = (t.double() for t in (value, *ends))
            low, high = value.minimum(ends[0].minimum(ends[1])), value.maximum(ends[0].maximum(ends[1]))
            low, high = low - error, high + error
            rounding = raw.abs() + value.abs()
        rounding = OPERATIONS * self.units.scores * rounding.nan_to_num(0.0, 0.0, 0.0)
        dead = ~live
        value, low, high = (t.masked_fill(dead, -math.inf) for t in (value, low - rounding, high + rounding))
        return Scores(live, raw, off, value, low, high)

    def _of_products(self, left: Tensor, right: Tensor) -> Tensor:
        """By how much left @ right^T may be off."""
        terms = size_of(left) @ size_of(right).transpose(-1, -2)
        return ((4 + math.sqrt(left.size(-1))) * self.units.scores + self.units.operands) * terms

    def _weights(self, scores: Scores, lse: Tensor) -> tuple[Tensor, Tensor]:
        """exp(score - lse), and by how much it may be off."""
        base = torch.where(lse == -math.inf, math.inf, lse)  # no lane of a dead row has weight
        ulps = OPERATIONS * self.units.scores * (1 + lse.abs().nan_to_num(0.0, 0.0, 0.0))
        weight, low, high = ((t - base).exp() for t in (scores.value, scores.low - ulps, scores.high + ulps))
        weight = weight.where(scores.live, 0.0)
        off = torch.maximum(high - weight, weight - low).nan_to_num(0.0)
        return weight, off.where(scores.live, 0.0) + TINY

    def dropped(self, tile: _Tile, *weights: Tensor) -> tuple[Tensor, ...]:
        """Weights, or their gradients, once dropout has left some out."""
        if self.dropout is None:
            return weights
        by = factors(self.dropout, self.indices(tile))
        return tuple(weight * by for weight in weights)

    def _sums(self, count: int) -> float:
        """The error of adding up `count` terms, relative to the sum of their magnitudes."""
        return (OPERATIONS + math.sqrt(count) / 2) * self.units.scores

    def _products(self, squares: Tensor, terms: Tensor, moved: Tensor) -> Tensor:
        """The error from rounding one factor of each summed product; `moved` is one sample."""
        worst = 2 * size_of(moved).amax(-1, keepdim=True)
        return torch.minimum(
            self.units.weights * SPREAD * squares.sqrt() + worst, 1.2 * self.units.weights * terms
        )

    # Forward.

    def forward(self, region: Region) -> dict[str, Bounded]:
        """All results, by name, meaningful in the region's rows."""
        rows = self.query.shape[:3]
        results = {
            name: Bounded(*(self.query.new_zeros(shape, dtype=torch.float64) for _ in range(2)))
            for name, shape in {"out": (*rows, self.value.size(-1)), **dict.fromkeys(OF_ROWS, rows)}.items()
        }
        for name, of_no_keys in (("lse", -math.inf), ("max_scores", -math.inf), ("max_indices", -1.0)):
            results[name].value.fill_(of_no_keys)
        if self.sinks is not None:
            results["lse"].value.copy_(self.sinks.unsqueeze(-1).expand(rows))
        for tile in self.tiles(region._replace(n=[slice(0, self.sizes["kv_idx"])])):
            at = tile[:3]
            scores = self.scores(tile)
            lse = scores.value.logsumexp(-1, keepdim=True)
            if self.sinks is not None:
                sink = self.sinks.expand(self.query.size(0), -1)[tile.b, tile.h, None, None].double()
                lse = torch.logaddexp(lse, sink)
            weight, off = self._weights(scores, lse)
            value = self.of_keys(self.value, tile)
            shift = off.sum(-1, keepdim=True)  # of the sum that weights are divided by
            entropy = self._entropy(tile, weight, off, None if self.sinks is None else (sink - lse).exp())
            weight, off = self.dropped(tile, weight, off)
            out = _times(weight, value, scores.live)
            size = size_of(value)
            moved = (off @ size + shift * size_of(out)) / (1 - shift).clamp(min=0.05)
            terms = weight @ size
            peak = scores.value.amax(-1, keepdim=True)
            by_rounding = _by_rounding((scores.value - peak).exp(), self.query.dtype) * (peak - lse).exp()
            (by_rounding,) = self.dropped(tile, by_rounding)
            lost = self._products(weight.square() @ size.square(), terms, finite(by_rounding) @ finite(value))
            lost = lost + self.units.least * (scores.live.double() @ size)
            error = moved + lost + self._sums(_length(tile.n)) * terms
            results["out"].value[at], results["out"].error[at] = out, error
            shift = shift.squeeze(-1)
            lse = lse.squeeze(-1)
            results["lse"].value[at] = lse
            results["lse"].error[at] = (
                shift / (1 - shift).clamp(min=0.05)
                + self._sums(_length(tile.n))
                + OPERATIONS * self.units.scores * size_of(lse)
            )
            peak = peak.squeeze(-1)
            ends = [apart(end.amax(-1), peak) for end in (scores.low, scores.high)]
            results["max_scores"].value[at] = peak
            results["max_scores"].error[at] = torch.maximum(*ends)
            for name, (found, error) in (
                ("entropy", entropy),
                ("max_indices", self._max_indices(tile, scores)),
            ):
                results[name].value[at], results[name].error[at] = found, error
        return results

    def _entropy(
        self, tile: _Tile, weight: Tensor, off: Tensor, of_sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shift, log = off.sum(-1), weight.clamp(min=TINY).log()
        entropy = torch.special.entr(weight).sum(-1)
        if of_sink is not None:
            entropy = entropy + torch.special.entr(of_sink.squeeze(-1))
        terms = 1 + size_of(entropy)
        # Its gradient is -weight * (log(weight) + entropy); the sum of the weights is as far off as they are together.
        moved = (off * size_of(log + entropy.unsqueeze(-1))).sum(-1) + shift * terms
        return entropy, moved / (1 - shift).clamp(min=0.05) + self._sums(_length(tile.n)) * terms

    def _max_indices(self, tile: _Tile, scores: Scores) -> tuple[Tensor, Tensor]:
        """Any is right where roundings decide which score is the largest."""
        peak = scores.value.amax(-1, keepdim=True)
        index = self.indices(tile)["kv_idx"].double().expand(scores.value.shape)
        first = torch.where(scores.value == peak, index, math.inf).amin(-1)
        may_be = scores.live & (scores.high >= scores.low.amax(-1, keepdim=True))
        rounded = (may_be & (scores.low != scores.high)).any(-1) & (may_be.sum(-1) > 1)
        sees_none = peak.squeeze(-1) == -math.inf
        return torch.where(sees_none, -1.0, first), torch.where(rounded & ~sees_none, math.inf, 0.0)

    # Backward.

    def backward(
        self,
        region: Region,
        upstream: tuple[Tensor, ...],
        wants: str,
        leaves: Leaves | None,
    ) -> dict[str, Bounded]:
        """Gradients of those of query, key and value that `wants` names; those of captures are added to `leaves`.

        `upstream` has out, lse, their gradients and that of the entropy; None for gradients that are zero.
        The region's rows for the query, its keys for the others: all that adds to these must be in it.
        """
        sums = {
            f"d_{name}": _Sum.like(tensor)
            for name, tensor in zip("qkv", (self.query, self.key, self.value), strict=True)
            if name in wants
        }
        keys = [part for n in region.n for part in _cut(n, KEYS)]
        for tile in self.tiles(region._replace(n=keys)):
            scores = self.scores(tile)
            if not scores.live.any():
                continue
            weight, off, grad, alone, shared, d_out = self._gradients(tile, scores, upstream)
            grad_off = alone + shared
            if leaves is not None:
                grad, grad_off = leaves.add(self.indices(tile), scores, grad, alone, shared)
            query, key = self.rows(self.query, tile) * self.scale, self.of_keys(self.key, tile) * self.scale
            across = [t.transpose(-1, -2) for t in (scores.live, weight, off, grad, grad_off)]
            if "d_q" in sums:
                sums["d_q"].add(tile[:3], *self._product(scores.live, grad, grad_off, key))
            for name, (factor, factor_off), other in (
                ("d_k", (across[3], across[4]), query),
                ("d_v", (across[1], across[2]), d_out),
            ):
                if name in sums:
                    parts = self._product(across[0], factor, factor_off, other)
                    self._add_to_keys(sums[name], tile, parts)
        keys, rows = self.sizes["kv_idx"], self.sizes["q_idx"] * self.group
        results = {}
        for name, total in sums.items():
            lost = self._sums(keys if name == "d_q" else rows) * total.terms + total.linear
            error = lost + self._products(total.squares, total.terms, total.moved)
            results[name] = Bounded(total.value, error)
        return results

    def _product(self, live: Tensor, factor: Tensor, factor_off: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        """The terms that a _Sum of factor @ other adds up."""
        size, magnitude = size_of(other), size_of(factor)
        return (
            _times(factor, other, live),
            (factor_off + self.units.least * live) @ size,
            magnitude.square() @ size.square(),
            magnitude @ size,
            _by_rounding(factor, self.query.dtype) @ finite(other),
        )

    def _add_to_keys(self, into: _Sum, tile: _Tile, parts: Sequence[Tensor]) -> None:
        """The query heads that share a KV head add up, and so do batches that share keys."""
        for tensor, part in zip(into, parts, strict=True):
            if tensor.size(0) != self.query.size(0):
                part, b = part.sum(0, keepdim=True), slice(None)
            else:
                b = tile.b
            tensor[b, :, tile.n].index_add_(1, self.kv_heads(tile), part)

    def _gradients(self, tile: _Tile, scores: Scores, upstream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Weights after dropout, the gradients of scores, and the gradient of out.

        Weights come with their error bound, gradients with two: for errors of their own, and of their row.
        """
        out, lse, grad_out, grad_lse, grad_entropy = upstream
        value = self.of_keys(self.value, tile)
        out = self.rows(out, tile)
        d_out = torch.zeros_like(out) if grad_out is None else self.rows(grad_out, tile)
        eps = self.units.scores
        delta = (d_out * out).sum(-1, keepdim=True)
        delta_off = self._sums(out.size(-1)) * (size_of(d_out) * size_of(out)).sum(-1, keepdim=True)
        if grad_lse is not None:
            d_lse = self.rows(grad_lse, tile).unsqueeze(-1)
            delta, delta_off = delta - d_lse, delta_off + OPERATIONS * eps * size_of(d_lse)
        weight, off = self._weights(scores, self.rows(lse, tile).unsqueeze(-1))
        slope, slope_off = self.dropped(
            tile, d_out @ value.transpose(-1, -2), self._of_products(d_out, value)
        )
        slope = slope - delta
        if grad_entropy is not None:
            d_entropy, log = self.rows(grad_entropy, tile).unsqueeze(-1), weight.clamp(min=TINY).log()
            slope = slope - d_entropy * log
            slope_off = slope_off + size_of(d_entropy) * size_of(off / weight.clamp(min=TINY))
        grad = (weight * slope).where(scores.live, 0.0)
        reached = (weight + off).nan_to_num(0.0).where(scores.live, 0.0)
        alone = off * size_of(slope) + reached * slope_off + OPERATIONS * eps * size_of(grad)
        weight, off = self.dropped(tile, weight, off)
        return weight, off, grad, alone.where(scores.live, 0.0), reached * delta_off, d_out


class _Sum(NamedTuple):
    """A matrix product as it adds up, and what bounds its error."""

    value: Tensor
    linear: Tensor  # errors that factors came with
    squares: Tensor  # of the terms
    terms: Tensor  # their magnitudes
    moved: Tensor  # by rounding one factor

    @staticmethod
    def like(tensor: Tensor) -> _Sum:
        return _Sum(*(tensor.new_zeros(tensor.shape, dtype=torch.float64) for _ in range(5)))

    def add(self, at: tuple[slice, ...], *parts: Tensor) -> None:
        for tensor, part in zip(self, parts, strict=True):
            tensor[at] += part


def _times(left: Tensor, right: Tensor, live: Tensor) -> Tensor:
    """left @ right, where a lane that is not live adds nothing, and one that meets what is not finite NaN."""
    finite = right.isfinite()
    if bool(finite.all()):
        return left @ right
    met = live.double() @ (~finite).double() > 0
    return (left @ right.where(finite, 0.0)).masked_fill(met, math.nan)


def _by_rounding(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return finite(factor.to(dtype).double() - factor)


def _cut(span: slice, step: int) -> Iterator[slice]:
    for start in range(span.start, span.stop, step):
        yield slice(start, min(start + step, span.stop))


def _length(span: slice) -> int:
    return span.stop - span.start
