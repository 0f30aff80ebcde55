"""Compiled attention checked as it runs: what a kernel gave against this file's fp64, and an error where it differs.

Small calls are checked whole, large ones in some rows of queries and, for the gradients of key and value, in some
columns of keys; the gradients of captured tensors of large calls are not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat, errors
from . import chunked
from .chunked_ops import mods_from, program_from, schedule_from
from .tracing import score_dtype

WHOLE_LANES = 1 << 25  # up to this many scores nothing is left out
SAMPLES = 4  # of each kind of tile in larger calls
TILE = 128  # what a message calls a tile
# In units of eps times the terms that were summed: results are rounded, and so are weights before the products.
ROUNDINGS, GRADIENT_ROUNDINGS = 4, 16

_places = random.Random(0)  # of its own: what is verified draws the same numbers as without

_library = torch.library.Library("flex_inductor", "FRAGMENT")
_CALL = (
    "Tensor query, Tensor key, Tensor value, str form, int[] blocks, Tensor?[] schedule, str score_mod, "
    "str mask_mod, float scale, Tensor[] score_captures, Tensor[] mask_captures, str code"
)
_library.define(f"verified_forward({_CALL}, Tensor out, Tensor? lse) -> Tensor")
_library.define(
    f"verified_backward({_CALL}, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, str joint, str wants, "
    "bool[] wanted_captures, Tensor[] grads) -> Tensor[]"
)


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    form: str
    blocks: list[int]
    schedule: list[Tensor | None]
    score_mod: str
    mask_mod: str
    scale: float
    score_captures: list[Tensor]
    mask_captures: list[Tensor]
    code: str  # of the mods, for the message

    @property
    def lanes(self) -> int:
        return self.query.size(0) * self.query.size(1) * self.query.size(2) * self.key.size(2)

    def given(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the chunked functions take, the inputs in `dtype`."""
        return {
            **{name: getattr(self, name).to(dtype) for name in ("query", "key", "value")},
            "schedule": schedule_from(self.form, self.blocks, self.schedule),
            "mods": mods_from(self.score_mod, self.mask_mod, self.score_captures, self.mask_captures),
            "scale": self.scale,
        }


@torch.library.impl(_library, "verified_forward", "CompositeExplicitAutograd")
@torch.no_grad()
def _forward(*args: Any) -> Tensor:
    call, (out, lse) = _Call(*args[:12]), args[12:]
    part = _sampled(call, "queries")
    exact = call.given(torch.float64)
    gold, gold_lse, _ = chunked.forward(**exact, part=part)
    plain, plain_lse, _ = chunked.forward(**call.given(score_dtype(call.query.dtype)), part=part)
    terms, _, _ = chunked.forward(**{**exact, "value": exact["value"].abs()}, part=part)
    rounding = ROUNDINGS * _eps(call.query)
    _compare(call, "out", out, gold, plain, rounding * terms, part.queries)
    if lse is not None:
        _compare(
            call,
            "lse",
            lse,
            gold_lse,
            plain_lse,
            rounding * (1 + gold_lse.abs().nan_to_num(posinf=0.0)),
            part.queries,
        )
    return out.clone()


@torch.library.impl(_library, "verified_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _backward(*args: Any) -> list[Tensor]:
    call = _Call(*args[:12])
    out, lse, grad_out, grad_lse, joint, wants, wanted_captures, grads = args[12:]
    found = iter(grads)
    got = {f"d_{name}": next(found) for name in wants}
    captured = {f"d_captures[{i}]": next(found) for i, wanted in enumerate(wanted_captures) if wanted}

    def reference(dtype: torch.dtype, part: chunked.Part) -> dict[str, Tensor]:
        upstream = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
        *d_qkv, d_captures = chunked.backward(
            **call.given(dtype),
            **{name: None if tensor is None else tensor.to(dtype) for name, tensor in upstream.items()},
            joint=program_from(joint),
            wants=[name in wants for name in "qkv"],
            part=part,
        )
        named = {f"d_{name}": grad for name, grad in zip("qkv", d_qkv, strict=True)}
        return named | {f"d_captures[{i}]": grad for i, grad in enumerate(d_captures)}

    whole = call.lanes <= WHOLE_LANES
    checks = [("queries", ["d_q"]), ("keys", ["d_k", "d_v"])]
    for side, names in [("", [*got, *captured])] if whole else checks:
        part = _sampled(call, side)
        gold, plain = reference(torch.float64, part), reference(score_dtype(call.query.dtype), part)
        largest = max(
            (t.abs().max() for t in gold.values() if t is not None and t.numel()), default=torch.zeros(())
        )
        for name in names:
            if name not in got and name not in captured:
                continue
            rounding = GRADIENT_ROUNDINGS * _eps(call.query) * largest
            tensor = {**got, **captured}[name]
            inside = part.queries if name == "d_q" else part.keys
            _compare(call, name, tensor, gold[name], plain[name], rounding.expand(tensor.shape), inside)
    return [grad.clone() for grad in grads]


@torch.library.register_fake("flex_inductor::verified_forward", lib=_library)
def _forward_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[12])


@torch.library.register_fake("flex_inductor::verified_backward", lib=_library)
def _backward_fake(*args: Any) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in args[-1]]


def _sampled(call: _Call, side: str) -> chunked.Part:
    """Everything in small calls; else some of the chunks along one side, the first and the last among them."""
    if call.lanes <= WHOLE_LANES or not side:
        return chunked.EVERYTHING
    length = call.query.size(2) if side == "queries" else call.key.size(2)
    starts = [0, *(_places.randrange(length) for _ in range(SAMPLES - 2)), length - 1]
    tiles = [start // TILE * TILE for start in starts]
    return chunked.Part(**{side: lambda at: any(at.start < tile + TILE and tile < at.stop for tile in tiles)})


def _eps(query: Tensor) -> float:
    tf32 = query.is_cuda and query.dtype == torch.float32 and compat.allows_tf32()
    return 2.0**-10 if tf32 else torch.finfo(query.dtype).eps


def _compare(
    call: _Call, name: str, got: Tensor, gold: Tensor, plain: Tensor, rounding: Tensor, inside: Any
) -> None:
    """Raise for the first tile where `got` is off by more than the same sum in plain fp32, and rounding."""
    for where in _tiles(got, inside):
        part, want = got[where].double(), gold[where]
        same = (part == want) | (part.isnan() & want.isnan())
        allowed = 2 * (plain[where].double() - want).abs().nan_to_num(0.0) + rounding[where]
        off = (part - want).abs()
        wrong = ~same & ~(off <= allowed)
        if wrong.any():
            worst = torch.where(wrong, off.nan_to_num(torch.inf), -1.0).argmax()
            at = [int(i) for i in torch.unravel_index(worst, off.shape)]
            place = [s.start + i for s, i in zip(where, at, strict=True)]
            raise errors.kernel_differs(
                name,
                [(s.start, s.stop) for s in where],
                place,
                part[tuple(at)].item(),
                want[tuple(at)].item(),
                allowed[tuple(at)].item(),
                call.code,
            )


def _tiles(tensor: Tensor, inside: Any) -> Iterator[tuple[slice, ...]]:
    """Tiles of TILE rows of one batch and head, those that were computed; a captured tensor is one tile."""
    if tensor.dim() < 3:
        yield tuple(slice(0, size) for size in tensor.shape)
        return
    rest = tuple(slice(0, size) for size in tensor.shape[3:])
    for b in range(tensor.size(0)):
        for h in range(tensor.size(1)):
            for start in range(0, tensor.size(2), TILE):
                rows = slice(start, min(start + TILE, tensor.size(2)))
                if inside(rows):
                    yield (slice(b, b + 1), slice(h, h + 1), rows, *rest)
