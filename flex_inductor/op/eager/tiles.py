"""A call's tensors, cut into tiles: chunks of scores, and the rows of queries, keys and values that belong to them.

Memory is bounded by CHUNK_ELEMENTS scores at a time, or by as many elements if a mod makes a tensor for each score.

    B batch  H query heads  K key/value heads  G = H / K  M queries  N keys  D, V head dims
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mod_ir import errors as mod_errors
from ...mod_ir.arguments import INDEX_DTYPE, score_dtype
from ...mod_ir.program import AXES, LaneProgram
from ...mod_ir.split import Programs
from ...softmax import is_narrow
from ...softmax.dropout import keeps_of_tile, scale_of
from ...visits.band import Band
from ..call import Inputs, is_guarded
from .lanes import function_of, run_lanes, unexpanded

# A tile of 2^20 scores is large enough to hide the cost of calling torch and small enough for a cache
# level near the cores; narrow tiles rule out more of a causal mask.
CHUNK_ELEMENTS = 1 << 20
MAX_CHUNK_KEYS = 512
MAX_CHUNK_QUERIES = 256
MAX_LANE_ELEMENTS = 1 << 20  # of a tensor that a mod makes for a single score


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


class _Run:
    """One call's tensors, cut into tiles.

    `factors` are the tensors that products over tokens multiply.
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
        group = max(self.group, 1)
        queries = max(1, min(self.queries, MAX_CHUNK_QUERIES, CHUNK_ELEMENTS // (keys * group)))
        rows = queries * group
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
        return unexpanded(live)

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


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    # A sum is not finite if any element is not. If finite ones overflow, the careful way is taken in vain.
    sums = [
        (tensor.float() if is_narrow(tensor) else tensor).sum(dtype=score_dtype(tensor.dtype))
        for tensor in tensors
    ]
    return bool(torch.stack(sums).isfinite().all())


def _ranges(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _length(at: slice) -> int:
    return at.stop - at.start
