"""Forward mode, and derivatives of the backward, in chunks.

With s_ij = scale q_i k_j and p_ij = exp(f(s_ij) - lse_i), the backward computes for each tile

    t = d_out v^T - delta       e = p t             (d_raw, d captures) = J(s, e)
    d q = scale d_raw k         d k = scale d_raw^T q           d v = p^T d_out

Given lse and delta, nothing in it looks beyond a tile, so neither does a derivative of it. A direction is a change
`along` of query, key, value and captures; it changes s by `along` and f(s) by `bent`. What depends on it is text in the
ops' `call`: see `mod_ir/derivatives.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mod_ir.arguments import score_dtype
from ...mod_ir.program import LaneProgram
from ...mod_ir.split import SecondPrograms
from .. import call_text
from ..layout import empty_like_layout
from ..library import define
from .lanes import Accumulators, function_of, run_lanes
from .tiles import run_of

SERVES = {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "dropout", "in_blocks"}


class _Tile(NamedTuple):
    at: Any
    live: Tensor | None
    raw: Tensor  # scores before score_mod
    weight: Tensor
    along: Tensor
    bent: Tensor

    def alive(self, lanes: Tensor) -> Tensor:
        return lanes if self.live is None else torch.where(self.live, lanes, 0.0)


class _Walk:
    """One walk over the tiles of a call."""

    def __init__(self, qkv: Sequence[Tensor], along: Sequence[Tensor], call: Any, *rows: Tensor):
        self.query, self.key, self.value = qkv
        self.along, self.mods, self.scale = along[:3], call.mods, call.scale
        self.captures = call.inputs.score_captures
        self.with_along = (*self.captures, *along[3:])
        factors = (*qkv, *self.along, *rows)
        self.run = run_of(self.query, self.key, self.value, call.inputs, self.mods, self.scale, factors)
        self.dtype = self.run.dtype
        self.joint = _first_result(self.mods.joint, self.captures)
        self.tangent = _first_result(self.mods.tangent, self.with_along)

    def tiles(self, lse: Tensor) -> Iterator[_Tile]:
        run, (query_along, key_along, _) = self.run, self.along
        for rows in run.row_tiles():
            row_lse = run.rows(lse, rows).unsqueeze(-1)
            row_lse = torch.where(row_lse == -math.inf, math.inf, row_lse)  # no lane of a dead row has weight
            for at, raw, score, live in run.score_tiles(rows, run.scaled_query(rows)):
                tile = _Tile(at, live, raw, (score - row_lse).exp(), raw, raw)
                along = self.products(tile, query_along, self.key) + self.products(
                    tile, self.query, key_along
                )
                along = along * self.scale
                bent = self.tangent(run, tile, along, score=raw, score_along=along)
                yield tile._replace(weight=tile.alive(tile.weight), along=along, bent=bent)

    def upstream(self, tile: _Tile, grad_out: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """t, e and d_raw."""
        t = tile.alive(self.of_weights(tile, grad_out, self.value) - self.of_rows(tile, delta).unsqueeze(-1))
        e = tile.weight * t
        return t, e, self.joint(self.run, tile, e, score=tile.raw, grad_score=e)

    def of_rows(self, tile: _Tile, tensor: Tensor) -> Tensor:
        return self.run.rows(tensor, tile.at)

    def products(self, tile: _Tile, rows: Tensor, keys: Tensor) -> Tensor:
        """Of each row with each key."""
        transposed = self.run.of_kv(keys, tile.at).transpose(-1, -2)
        return tile.alive(self.run.per_query_head(self.of_rows(tile, rows), transposed))

    def dropped(self, tile: _Tile, lanes: Tensor) -> Tensor:
        return self.run.dropped(tile.at, lanes)

    def of_weights(self, tile: _Tile, grad_out: Tensor, value: Tensor) -> Tensor:
        """The gradients of weights."""
        return self.dropped(tile, self.products(tile, grad_out, value))

    def sum_to_rows(self, into: Tensor, tile: _Tile, lanes: Tensor, keys: Tensor) -> None:
        """into += lanes @ keys."""
        at = tile.at
        into[at.b, at.h, at.m] += self.run.per_query_head(lanes, self.run.of_kv(keys, at), tile.live)

    def sum_to_keys(self, into: Tensor, tile: _Tile, lanes: Tensor, rows: Tensor) -> None:
        """into += lanes^T @ rows."""
        self.run.add_per_kv_head(into, tile.at, lanes, self.of_rows(tile, rows), tile.live)

    def sum_products(
        self, d_query: Tensor, d_key: Tensor, tile: _Tile, second: Tensor, d_raw: Tensor
    ) -> None:
        """What query and key get, if the change of d_raw is `second`."""
        query_along, key_along, _ = self.along
        for lanes, query, key in ((second, self.query, self.key), (d_raw, query_along, key_along)):
            scaled = tile.alive(lanes) * self.scale
            self.sum_to_rows(d_query, tile, scaled, key)
            self.sum_to_keys(d_key, tile, scaled, query)

    def zeros(self, *like: Tensor) -> list[Tensor]:
        return [empty_like_layout(tensor, tensor.shape, self.dtype).zero_() for tensor in like]

    def second(self, leaves: Accumulators | None, tile: _Tile, e: Tensor, change: Tensor) -> Tensor:
        """The change of d_raw, if those of raw and e are `along` and `change`; adds up that of captures."""
        if leaves is None:
            return change
        lanes = {"score_along": tile.along, "grad_score_along": change}
        return leaves.add(self.run.indices(tile.at), tile.raw, e, tile.live, **lanes)

    def leaves(self) -> Accumulators | None:
        second = self.mods.second
        return second and Accumulators(second, self.with_along, self.dtype, self.query.device)


def _first_result(program: LaneProgram | None, captures: Sequence[Tensor]) -> Callable[..., Tensor]:
    """A function that gives a program's first result on a tile, or `otherwise` if there is no program."""
    if program is None:
        return lambda run, tile, otherwise, **lanes: otherwise
    invariants = function_of(program.prologue)(*captures)

    def result(run: Any, tile: _Tile, otherwise: Tensor, **lanes: Tensor) -> Tensor:
        lanes.update(run.indices(tile.at))
        first, *_ = run_lanes(program, lanes, tile.live, captures, invariants)
        return tile.alive(first.to(run.dtype))

    return result


def forward_jvp(qkv, rows, along, _rows_along, call):
    """sum_j p_ij (bent_ij v_j + d v_j) and sum_j p_ij bent_ij."""
    walk = _Walk(qkv, along, call)
    of_out, of_lse = (empty.zero_() for empty in empty_forward_jvp(qkv, rows, along, (), call))
    for tile in walk.tiles(*rows):
        change = tile.weight * tile.bent
        walk.sum_to_rows(of_out, tile, walk.dropped(tile, change), walk.value)
        walk.sum_to_rows(of_out, tile, walk.dropped(tile, tile.weight), along[2])
        of_lse[tile.at.b, tile.at.h, tile.at.m] += change.sum(-1)
    return [of_out, of_lse]


def empty_forward_jvp(qkv, _rows, _along, _rows_along, _call):
    query, _, value = qkv
    dtype = score_dtype(query.dtype)
    shape = (*query.shape[:3], value.size(-1))
    return [empty_like_layout(query, shape, dtype), query.new_empty(shape[:3], dtype=dtype)]


def backward_vjp(qkv, rows, along, _rows_along, call):
    """Gradients of <backward, along>: of query, key, value, captures, and of the rows."""
    lse, grad_out, delta = rows
    walk = _Walk(qkv, along, call, grad_out)
    d_query, d_key, d_value = walk.zeros(*qkv)
    d_lse, d_grad_out, d_delta = walk.zeros(*rows)
    leaves = walk.leaves()
    for tile in walk.tiles(lse):
        at = tile.at
        t, e, d_raw = walk.upstream(tile, grad_out, delta)
        to_t = tile.weight * tile.bent
        to_score = tile.weight * (walk.of_weights(tile, grad_out, along[2]) + tile.bent * t)
        d_lse[at.b, at.h, at.m] -= to_score.sum(-1)
        d_delta[at.b, at.h, at.m] -= to_t.sum(-1)
        walk.sum_to_rows(d_grad_out, tile, walk.dropped(tile, tile.weight), along[2])
        walk.sum_to_rows(d_grad_out, tile, walk.dropped(tile, to_t), walk.value)
        walk.sum_to_keys(d_value, tile, walk.dropped(tile, to_t), grad_out)
        second = walk.second(leaves, tile, e, to_score)
        walk.sum_products(d_query, d_key, tile, second, d_raw)
    captures = [] if leaves is None else leaves.gradients()
    return _rounded(
        (d_query, d_key, d_value, *captures, d_lse, d_grad_out, d_delta), (*qkv, *along[3:], *rows)
    )


def empty_backward_vjp(qkv, rows, along, rows_along, call):
    of_rows = [empty_like_layout(tensor, tensor.shape) for tensor in rows]
    return [*empty_backward_jvp(qkv, rows, along, rows_along, call), *of_rows]


def backward_jvp(qkv, rows, along, rows_along, call):
    """The change of the gradients of query, key, value and captures."""
    lse, grad_out, delta = rows
    lse_along, grad_out_along, delta_along = rows_along
    walk = _Walk(qkv, along, call, grad_out, grad_out_along)
    d_query, d_key, d_value = walk.zeros(*qkv)
    leaves = walk.leaves()
    for tile in walk.tiles(lse):
        t, e, d_raw = walk.upstream(tile, grad_out, delta)
        weight_along = tile.weight * tile.alive(tile.bent - walk.of_rows(tile, lse_along).unsqueeze(-1))
        t_along = walk.of_weights(tile, grad_out_along, walk.value) + walk.of_weights(
            tile, grad_out, along[2]
        )
        t_along = tile.alive(t_along - walk.of_rows(tile, delta_along).unsqueeze(-1))
        walk.sum_to_keys(d_value, tile, walk.dropped(tile, weight_along), grad_out)
        walk.sum_to_keys(d_value, tile, walk.dropped(tile, tile.weight), grad_out_along)
        second = walk.second(leaves, tile, e, weight_along * t + tile.weight * t_along)
        walk.sum_products(d_query, d_key, tile, second, d_raw)
    captures = [] if leaves is None else leaves.gradients()
    return _rounded((d_query, d_key, d_value, *captures), (*qkv, *along[3:]))


def empty_backward_jvp(qkv, _rows, along, _rows_along, _call):
    of_qkv = [empty_like_layout(tensor, tensor.shape) for tensor in qkv]
    return [*of_qkv, *(capture.new_empty(capture.shape) for capture in along[3:])]


def _rounded(results: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    found = [result for result in results if result is not None]
    return [result.to(tensor.dtype) for result, tensor in zip(found, like, strict=True)]


# `rows` are lse, and for derivatives of the backward grad_out and delta.
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor[] rows, Tensor[] along, Tensor[] rows_along, Tensor[] tensors, "
    "str call) -> Tensor[]"
)


@torch.no_grad()
def _computed(compute, query, key, value, rows, along, rows_along, tensors, call):
    return compute(
        (query, key, value), rows, along, rows_along, call_text.load(call, tensors, SecondPrograms)
    )


for _compute, _empty in (
    (forward_jvp, empty_forward_jvp),
    (backward_vjp, empty_backward_vjp),
    (backward_jvp, empty_backward_jvp),
):
    _run, _fake = (functools.partial(_computed, function) for function in (_compute, _empty))
    define(_compute.__name__, _SCHEMA, _run, _fake)
