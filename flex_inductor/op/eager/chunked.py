"""Attention in chunks with an online softmax: the route that serves every device, dtype and mod.

Memory is bounded by CHUNK_ELEMENTS scores at a time, or by as many elements if a mod makes a tensor for each score.
Blocks that the schedule leaves out are not computed.

    B batch  H query heads  K key/value heads  G = H / K  M queries  N keys  D, V head dims
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ... import compat
from ...mod_ir import errors as mod_errors
from ...mod_ir.arguments import INDEX_DTYPE, score_dtype
from ...mod_ir.broadcast import along, broadcasting
from ...mod_ir.program import AXES, LaneProgram, Leaf
from ...mod_ir.split import Programs
from ...softmax import COLUMN_SUMS, is_narrow, with_sinks
from ...softmax.dropout import keeps_of_tile, scale_of
from ...visits.band import Band
from ..call import QKV, Inputs, is_guarded
from ..layout import empty_like_layout

# A tile of 2^20 scores is large enough to hide the cost of calling torch and small enough for a cache
# level near the cores; narrow tiles rule out more of a causal mask.
CHUNK_ELEMENTS = 1 << 20
MAX_CHUNK_KEYS = 512
MAX_CHUNK_QUERIES = 256
MAX_LANE_ELEMENTS = 1 << 20  # of a tensor that a mod makes for a single score
LAST = torch.iinfo(torch.int64).max
# What a row that sees no key has.
NOTHING = {
    "out": 0.0,
    "lse": -math.inf,
    "max_scores": -math.inf,
    "mean_scores": 0.0,
    "max_indices": -1,
    COLUMN_SUMS: 0.0,
}


SERVES = {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "partial", COLUMN_SUMS}
SERVES |= {"sinks", "dropout", "in_blocks", "kv_scales", "grad_mean"}


class _Tile(NamedTuple):
    """A chunk of scores: ranges of batches, KV heads, queries and keys, where they lie in memory."""

    b: slice
    k: slice
    h: slice
    m: slice
    n: slice
    kv_b: slice | None = None  # of keys and values, if a map has them in other batches
    line: int = 0  # of the map
    shift: tuple[int, int, int, int] = (0, 0, 0, 0)  # from places in memory to the indices that mods see

    @property
    def lanes(self) -> list[range]:
        """The indices that mods see along AXES."""
        places = (self.b, self.h, self.m, self.n)
        return [range(at.start + by, at.stop + by) for at, by in zip(places, self.shift, strict=True)]


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
            shrink = torch.exp(peak - safe_peak)
            weight = (score - safe_peak).exp_()
            total = total.mul_(shrink).add_(weight.sum(-1, keepdim=True))
            if "mean_scores" in more:
                weighted = weighted.mul_(shrink).add_((weight * _finite(score)).sum(-1, keepdim=True))
            weight = run.dropped(tile, weight)
            acc = acc.mul_(shrink).add_(run.per_query_head(weight, run.value(tile), live))
            peak = new_peak
        sums = torch.cat([acc, weighted], -1)
        result, row_lse = sums / torch.where(total == 0, 1.0, total), (peak + total.log()).squeeze(-1)
        if inputs.sinks is not None:
            batches = rows.b if inputs.sinks.size(0) > 1 else slice(0, 1)
            result, row_lse = with_sinks(result, row_lse, inputs.sinks[batches, rows.h])
        at = rows.b, rows.h, rows.m
        out[at] = result[..., :-1].to(out.dtype)
        lse[at] = row_lse
        row_max[at] = peak.squeeze(-1)
        for name, tensor in known.items():
            if name != COLUMN_SUMS:
                tensor[at] = result[..., -1] if name == "mean_scores" else largest.squeeze(-1)
    if COLUMN_SUMS in known:
        known[COLUMN_SUMS].copy_(_column_sums(query, key, lse, inputs, mods, scale))
    return out, lse, row_max, *further


def _column_sums(
    query: Tensor, key: Tensor, lse: Tensor, inputs: Inputs, mods: Programs, scale: float
) -> Tensor:
    """The sum of each key's weights, as the gradient of values of one 1 for ones."""
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
            if inputs.grad_mean is not None:
                d_score += weight * _finite(score) * inputs.grad_mean[rows.b, rows.h, rows.m].unsqueeze(-1)
            if leaves is not None:
                d_score = leaves.add(run, tile, raw, d_score, live)
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


def _finite(score: Tensor) -> Tensor:
    """Scores whose product with a weight of 0 is 0."""
    return score.clamp(min=torch.finfo(score.dtype).min)


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


class _Run:
    """One call's tensors, cut into tiles.

    `factors` are the tensors that rows of other tokens are multiplied with.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        inputs: Inputs,
        mods: Programs,
        scale: float,
        factors: Sequence[Tensor],
    ):
        self.query, self.kv, self.scale, self.mods, self.inputs = query, (key, value), scale, mods, inputs
        schedule, lengths = inputs.schedule, (query.size(2), key.size(2))
        self.schedule: Any = schedule and schedule.bands(*lengths, inputs.tile_map, query.device)
        self.dtype = score_dtype(query.dtype)
        self.batch, self.heads, self.queries, _ = query.shape
        self.kv_heads, self.keys = key.shape[1:3]
        self.group = self.heads // max(self.kv_heads, 1)
        self.width = max(query.size(-1), value.size(-1))
        self.score_invariants = function_of(mods.score.prologue)(*inputs.score_captures) if mods.score else ()
        self.mask_invariants = function_of(mods.mask.prologue)(*inputs.mask_captures) if mods.mask else ()
        programs = [(of, program) for of, program in mods._asdict().items() if program]
        self.tensors = [tensor for _, program in programs for tensor in program.tensors]
        for of, program in programs:
            for _, size in program.tensors:
                if size > MAX_LANE_ELEMENTS:
                    name = "mask_mod" if of == "mask" else "score_mod"
                    raise mod_errors.tensor_in_lane(name, size, MAX_LANE_ELEMENTS)
        self.tile = self._tile_sizes()
        masked = is_guarded(mods.mask, inputs)
        self.all_finite = not masked or _all_finite(factors)

    def _tile_sizes(self) -> tuple[int, int, int, int]:
        """How many batches, KV heads, queries and keys a tile has, within what CHUNK_ELEMENTS allows."""
        keys = min(max(self.keys, 1), MAX_CHUNK_KEYS)
        queries = max(1, min(self.queries, MAX_CHUNK_QUERIES, CHUNK_ELEMENTS // (keys * self.group)))
        rows = queries * self.group
        per_head = max(rows * keys, rows * self.width, keys * self.width)
        kv_heads = max(1, min(self.kv_heads, CHUNK_ELEMENTS // per_head))
        batches = max(1, min(self.batch, CHUNK_ELEMENTS // (per_head * kv_heads)))
        sizes = dict(zip(AXES, (batches, kv_heads, queries, keys), strict=True))
        for axes, size in self.tensors:
            group = self.group if "h" in axes else 1
            for axis in axes:
                while sizes[axis] > 1 and size * group * math.prod(sizes[a] for a in axes) > CHUNK_ELEMENTS:
                    sizes[axis] = -(-sizes[axis] // 2)
        return tuple(sizes.values())  # type: ignore[return-value]

    def row_tiles(self) -> Iterator[_Tile]:
        """Tiles of batches, heads and queries; each is walked along the keys."""
        if 0 in (self.batch, self.heads, self.queries):
            return
        batches, kv_heads, queries, _ = self.tile
        for b in _ranges(self.batch, batches):
            for k in _ranges(self.kv_heads, kv_heads):
                h = slice(k.start * self.group, k.stop * self.group)
                for m in _ranges(self.queries, queries):
                    yield _Tile(b, k, h, m, slice(0, self.keys))

    def score_tiles(
        self, rows: _Tile, scaled_query: Tensor
    ) -> Iterator[tuple[_Tile, Tensor, Tensor, Tensor | None]]:
        """Tiles of `rows` with any live lane: scores before and after score_mod, live lanes (None for all)."""
        band = self.band(rows)
        for tile, listed in self.key_tiles(rows, band):
            live = self.live(tile, band, listed)
            if live is not None and not live.any():
                continue
            raw = score = self.per_query_head(scaled_query, self.key(tile).transpose(-1, -2))
            if self.mods.score is not None:
                lanes = {"score": raw, **self.indices(tile)}
                captures = self.inputs.score_captures
                (score,) = run_lanes(self.mods.score, lanes, live, captures, self.score_invariants)
            yield tile, raw, score.to(self.dtype), live

    def band(self, rows: _Tile) -> Band | None:
        """What the schedule has for these rows."""
        return None if self.schedule is None else self.schedule.band(rows.b, rows.h, rows.m)

    def key_tiles(self, rows: _Tile, band: Band | None) -> Iterator[tuple[_Tile, slice]]:
        """The tiles of `rows` along the keys, and each tile's keys as the schedule counts them."""
        step = self.tile[3]
        for n in _ranges(self.keys, step) if band is None else band.key_tiles(self.keys, step):
            if (tile := self.at_keys(rows, n)) is not None:
                yield tile, slice(n.start, n.start + _length(tile.n))

    def at_keys(self, rows: _Tile, n: slice) -> _Tile | None:
        """The tile of `rows` at these keys of the schedule; None if it has no keys."""
        return rows._replace(n=n)

    def live(self, tile: _Tile, band: Band | None, n: slice) -> Tensor | None:
        """The lanes that both the schedule and mask_mod leave, as a tensor that broadcasts; None for all."""
        mask = self.mods.mask
        if band is None:
            return None if mask is None else self._mask(mask, tile, None)
        if band.all_full(n) or (mask is None and band.visits_all(n)):
            return None
        visited, full = band.lanes(n)
        partial = visited & ~full
        if mask is None or not partial.any():
            return visited
        return (self._mask(mask, tile, partial) & partial) | full

    def _mask(self, mask: LaneProgram, tile: _Tile, partial: Tensor | None) -> Tensor:
        captures = self.inputs.mask_captures
        (live,) = run_lanes(mask, self.indices(tile), partial, captures, self.mask_invariants)
        return _unexpanded(live)

    def dropped(self, tile: _Tile, weight: Tensor) -> Tensor:
        """The weights that dropout leaves, or their gradients, scaled."""
        given = self.inputs.dropout
        if given is None:
            return weight
        return torch.where(keeps_of_tile(given, tile.lanes), weight * scale_of(given).to(weight.dtype), 0.0)

    def zeros(self, tile: _Tile, width: int) -> Tensor:
        shape = (_length(tile.b), _length(tile.h), _length(tile.m), width)
        return self.query.new_zeros(shape, dtype=self.dtype)

    def rows(self, tensor: Tensor, tile: _Tile) -> Tensor:
        return tensor[tile.b, tile.h, tile.m].to(self.dtype)

    def scaled_query(self, tile: _Tile) -> Tensor:
        return self.rows(self.query, tile) * self.scale

    def key(self, tile: _Tile) -> Tensor:
        return self._scaled(self.of_kv(self.kv[0], tile), 0, tile)

    def value(self, tile: _Tile) -> Tensor:
        return self._scaled(self.of_kv(self.kv[1], tile), 1, tile)

    def _scaled(self, rows: Tensor, which: int, tile: _Tile) -> Tensor:
        """Narrow keys or values, as what they stand for."""
        scales = self.inputs.kv_scales
        return rows * self.of_kv(scales[which], tile).unsqueeze(-1) if scales else rows

    def of_kv(self, tensor: Tensor, tile: _Tile) -> Tensor:
        return tensor[self._kv_batches(tile, tensor), tile.k, tile.n].to(self.dtype)

    def _kv_batches(self, tile: _Tile, tensor: Tensor) -> slice:
        if tile.kv_b is not None:
            return tile.kv_b
        return tile.b if tensor.size(0) == self.batch else slice(None)

    def per_query_head(self, left_BHMx: Tensor, right_BKxy: Tensor, live: Tensor | None = None) -> Tensor:
        """Every query head times what its KV head holds, without repeating the latter."""
        b, h, m, _ = left_BHMx.shape
        product = self._matmul(self._fold(left_BHMx), right_BKxy, self._fold_live(live, left_BHMx))
        return product.view(b, h, m, right_BKxy.size(-1))

    def add_per_kv_head(
        self, into_BKNy: Tensor, tile: _Tile, left_BHMN: Tensor, right_BHMy: Tensor, live: Tensor | None
    ) -> None:
        """into += left^T @ right, summed over the query heads of each KV head."""
        live = self._fold_live(live, left_BHMN)
        live = None if live is None else live.transpose(-1, -2)
        product = self._matmul(self._fold(left_BHMN).transpose(-1, -2), self._fold(right_BHMy), live)
        if into_BKNy.size(0) != self.batch and tile.kv_b is None:
            product = product.sum(0, keepdim=True)
        into_BKNy[self._kv_batches(tile, into_BKNy), tile.k, tile.n] += product

    def _fold(self, tensor_BHMx: Tensor) -> Tensor:
        """The query heads of one KV head as more rows: [B, K, G * M, x]."""
        b, h, m, x = tensor_BHMx.shape
        return tensor_BHMx.reshape(b, h // self.group, self.group * m, x)

    def _fold_live(self, live: Tensor | None, like_BHMN: Tensor) -> Tensor | None:
        return None if live is None or self.all_finite else self._fold(live.expand(like_BHMN.shape))

    def _matmul(self, left: Tensor, right: Tensor, live: Tensor | None) -> Tensor:
        """left @ right, without lanes that are not live: their 0 times NaN or infinity would be NaN."""
        if live is None:
            return left @ right
        finite = right.isfinite()
        product = left @ torch.where(finite, right, 0.0)
        for x in (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
            at = slice(x, x + 1)
            affected = live[..., at] & ~finite[..., at, :]
            product += torch.where(affected, left[..., at] * right[..., at, :], 0.0)
        return product

    def indices(self, tile: _Tile) -> dict[str, Tensor]:
        return {
            axis: torch.arange(at.start, at.stop, dtype=INDEX_DTYPE, device=self.query.device)
            for axis, at in zip(AXES, tile.lanes, strict=True)
        }


class _MappedRun(_Run):
    """One call with a map. Its tiles are the schedule's blocks."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, *rest: Any):
        super().__init__(query, key, value, inputs, *rest)
        tile_map: Any = inputs.tile_map
        self.q_lines, self.kv_lines = (lines.tolist() for lines in tile_map)
        block = self.schedule.kv_block
        self.keys, self.tile = len(self.kv_lines) * block, (*self.tile[:3], block)

    def row_tiles(self) -> Iterator[_Tile]:
        for line, (batch, row, sequence, head, index, count) in enumerate(self.q_lines):
            if count and self.heads:
                shift = (sequence - batch, head, index - row, 0)
                b, k, h = slice(batch, batch + 1), slice(0, self.kv_heads), slice(0, self.heads)
                yield _Tile(b, k, h, slice(row, row + count), slice(0, 0), b, line, shift)

    def band(self, rows: _Tile) -> Band:
        start = rows.line * self.schedule.q_block
        return self.schedule.band(slice(0, 1), rows.h, slice(start, start + _length(rows.m)))

    def at_keys(self, rows: _Tile, n: slice) -> _Tile | None:
        batch, row, _, _, index, count = self.kv_lines[n.start // self.tile[3]]
        shift = (*rows.shift[:3], index - row)
        at = slice(row, row + count)
        return rows._replace(n=at, kv_b=slice(batch, batch + 1), shift=shift) if count else None


def run_of(query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, *rest: Any) -> _Run:
    return (_Run if inputs.tile_map is None else _MappedRun)(query, key, value, inputs, *rest)


def run_lanes(
    program: LaneProgram,
    lanes: dict[str, Tensor],
    live: Tensor | None,
    captures: Sequence[Tensor],
    invariants: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The lane program on every lane of a tile: results have the shape [b, h, q_idx, kv_idx]."""
    guards = [_guard(live, axes, lanes["b"].device) for axes in program.guards]
    varies = [(name,) if name in AXES else AXES for name in program.lanes] + [axes for _, axes in guards]
    given = [lanes[name] for name in program.lanes] + [flags for flags, _ in guards]
    if function := broadcasting(program):
        placed = [along(axes, tensor) for axes, tensor in zip(varies, given, strict=True)]
        numbers = [along((), x) if _is_number(x) else x for x in (*captures, *invariants)]
        shape = [lanes[axis].numel() for axis in AXES]
        return tuple(result.expand(shape) for result in function_of(function)(*placed, *numbers))
    fixed = (None,) * (len(captures) + len(invariants))
    function = function_of(program.lane)
    for axis in reversed(AXES):
        in_dims = tuple(0 if axis in axes else None for axes in varies) + fixed
        function = torch.vmap(function, in_dims=in_dims)
    with compat.vmap_allowed():
        return function(*given, *captures, *invariants)


def function_of(graph: fx.GraphModule | Callable) -> Callable:
    """Without a module's hooks: hooks set for all modules may expect those of a model."""
    return graph.forward if isinstance(graph, fx.GraphModule) else graph


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _guard(live: Tensor | None, axes: Sequence[str], device: torch.device) -> tuple[Tensor, tuple[str, ...]]:
    """Whether any lane is live at each position along `axes`, and those of `axes` along which that varies."""
    if live is None:
        return torch.ones((), dtype=torch.bool, device=device), ()
    varies = [axis in axes and live.size(dim) > 1 for dim, axis in enumerate(AXES)]
    for dim in reversed(range(len(AXES))):
        if not varies[dim]:
            live = live.any(dim)
    return live, tuple(axis for axis, kept in zip(AXES, varies, strict=True) if kept)


def _unexpanded(lanes: Tensor) -> Tensor:
    """The result without vmap's repetition along axes it does not depend on."""
    for dim in range(len(AXES)):
        if lanes.stride(dim) == 0:
            lanes = lanes.narrow(dim, 0, 1)
    return lanes


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    # A sum is not finite if any element is not. If finite ones overflow, the careful way is taken in vain.
    sums = [
        (tensor.float() if is_narrow(tensor) else tensor).sum(dtype=score_dtype(tensor.dtype))
        for tensor in tensors
    ]
    return bool(torch.stack(sums).isfinite().all())


class Accumulators:
    """Sums what lanes contribute to captured tensors; the order of additions is fixed on CPU."""

    def __init__(
        self, joint: LaneProgram, captures: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ):
        self.joint, self.captures = joint, captures
        self.invariants = function_of(joint.prologue)(*captures)
        self.sums: dict[int, Tensor] = {}  # by leaf; one without indices once there is something to add
        self.shapes: list[list[int]] = []
        for i, leaf in enumerate(joint.leaves):
            sizes = zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            self.shapes.append([self.invariants[size] if invariant else size for size, invariant in sizes])
            places, row = self.shapes[-1][: leaf.indices], self.shapes[-1][leaf.indices :]
            if leaf.indices:
                self.sums[i] = torch.zeros((math.prod(places), *row), dtype=dtype, device=device)

    def add(
        self, run: _Run, tile: _Tile, raw: Tensor, d_score: Tensor, live: Tensor | None, **more: Tensor
    ) -> Tensor:
        """Run the joint graph on a tile: returns d(raw score), adds up d(captures)."""
        lanes = {"score": raw, "grad_score": d_score, **more, **run.indices(tile)}
        d_raw, *rest = run_lanes(self.joint, lanes, live, self.captures, self.invariants)
        for i, leaf in enumerate(self.joint.leaves):
            contribution, indices, rest = rest[0], rest[1 : 1 + leaf.indices], rest[1 + leaf.indices :]
            if live is not None:
                mask = live.reshape(*live.shape, *(1,) * (contribution.dim() - 4))
                contribution = torch.where(mask, contribution, 0.0)
            if leaf.indices:
                self._scatter(i, leaf, indices, contribution, live)
            else:
                total = _sum(contribution, range(4)).squeeze((0, 1, 2, 3))
                self.sums[i] = self.sums[i] + total if i in self.sums else total
        return d_raw.to(raw.dtype)

    def _scatter(
        self, i: int, leaf: Leaf, indices: Sequence[Tensor], value: Tensor, live: Tensor | None
    ) -> None:
        still = [dim for dim, axis in enumerate(AXES) if axis not in leaf.axes]
        value = _sum(value, still)
        flat = torch.zeros((), dtype=torch.int64, device=value.device)
        for index, size in zip(indices, self.shapes[i][: leaf.indices], strict=True):
            for dim in still:
                index = index.narrow(dim, 0, 1)
            index = _unexpanded(index).to(torch.int64)
            flat = flat * size + torch.where(index < 0, index + size, index)
        if live is not None:
            flat = torch.where(live.any(still, keepdim=True) if still else live, flat, 0)
        places = flat.expand(value.shape[:4]).reshape(-1)
        self.sums[i].index_add_(0, places, value.flatten(0, 3).to(self.sums[i].dtype))

    def gradients(self) -> tuple[Tensor | None, ...]:
        if len(self.sums) < len(self.shapes):  # no lane is live anywhere
            given = zip(self.joint.gradients, self.captures, strict=True)
            return tuple(torch.zeros_like(capture) if wanted else None for wanted, capture in given)
        leaves = enumerate(zip(self.joint.leaves, self.shapes, strict=True))
        sums = [self.sums[i].view(shape) if leaf.indices else self.sums[i] for i, (leaf, shape) in leaves]
        grads = function_of(self.joint.epilogue)(*sums, *self.captures, *self.invariants)
        return tuple(
            None if grad is None else grad.to(capture.dtype).expand(capture.shape).contiguous()
            for grad, capture in zip(grads, self.captures, strict=True)
        )


def _sum(lanes: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum along `dims`, kept, one at a time: torch splits a sum to a single number by the number of threads."""
    for dim in reversed(dims):
        lanes = lanes.sum(dim, keepdim=True)
    return lanes


def _ranges(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _length(at: slice) -> int:
    return at.stop - at.start
