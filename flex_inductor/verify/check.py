"""Checks compiled attention as it runs: compares a kernel's results with float64, and raises where they differ.

Calls of up to WHOLE_LANES scores are checked whole. Of larger ones: some rows of queries; for the gradients of key and
value some columns of keys; and of a captured tensor's gradient those elements to which only a few batches, heads, rows
or columns add. Calls with a map are checked sequence by sequence, large ones in some of them.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import errors
from ..mod_ir.arguments import score_dtype
from ..mod_ir.program import AXES
from ..mod_ir.split import Programs
from ..op import call_text
from ..op.call import QKV, check_served
from ..op.library import define
from ..visits.places import COUNT
from .bounded import Bounded
from .by_sequence import OneSequence, Side, groups_of
from .exact import Exact, Region
from .leaves import Leaves, offsets
from .mods import Mod

WHOLE_LANES = 1 << 25  # up to this many scores nothing is left out
SAMPLES = 4  # tiles of each kind in larger calls
TILE = 128  # what a message calls a tile
UNSEEN = {"lse": -math.inf, "max_scores": -math.inf, "max_indices": -1.0}  # of rows in no tile; others have 0

_places = random.Random(0)  # its own generator: verifying must not change the numbers that others draw


class _Part(NamedTuple):
    """The part that is checked at a time: the whole call, or one sequence of it."""

    exact: Exact
    whole: bool  # whether all of it is checked
    code: str  # of the mods, for the message

    @property
    def sizes(self) -> tuple[int, ...]:
        """Along AXES."""
        return tuple(self.exact.sizes.values())

    @property
    def sequence(self) -> int | None:
        return self.exact.sequence if isinstance(self.exact, OneSequence) else None

    def rows(self, tensor: Any) -> Any:
        """The parts of the call's tensors for its queries."""
        if tensor is None or not isinstance(self.exact, OneSequence):
            return tensor
        return self.exact.queries.taken(tensor)

    def keys(self, tensor: Tensor) -> Tensor:
        return self.exact.keys.taken(tensor) if isinstance(self.exact, OneSequence) else tensor

    def region(self, **part: Any) -> Region:
        """Everything, but for what `part` says."""
        b, h, m, n = (slice(0, size) for size in self.sizes)
        return Region(b, h, [m], [n])._replace(**part)


SERVES = {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "partial"}
SERVES |= {"sinks", "dropout", "in_blocks", "kv_scales", "grad_entropy"}


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    call: call_text.Call[Programs]
    code: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.query.shape[:3], self.key.size(2))

    @property
    def lanes(self) -> int:
        return torch.Size(self.sizes).numel()

    def parts(self) -> tuple[list[_Part], bool]:
        """The parts to check, and whether they are all of the call."""
        inputs: Any = self.call.inputs
        score, mask = self.call.data["score"], self.call.data["mask"]
        mods = (
            Mod(score, inputs.score_captures) if score else None,
            Mod(mask, inputs.mask_captures) if mask else None,
        )
        if inputs.tile_map is None:
            exact = Exact(*self[:3], inputs.schedule, *mods, self.call.scale, inputs.sinks, inputs.dropout)
            whole = self.lanes <= WHOLE_LANES
            return [_Part(exact, whole, self.code)], whole
        groups = groups_of(inputs.tile_map.queries)
        # As many scores as there would be with sequences of one length.
        keys = int(inputs.tile_map.keys[:, COUNT].sum())
        whole = self.query[..., 0].numel() * keys <= WHOLE_LANES * max(len(groups), 1)
        if not whole and len(groups) > SAMPLES:
            others = (_places.randrange(len(groups)) for _ in range(SAMPLES - 2))
            groups = [groups[i] for i in sorted({0, *others, len(groups) - 1})]
        found = [OneSequence(self[:3], inputs, group, *mods, self.call.scale) for group in groups]
        return [_Part(exact, whole or exact.lanes <= WHOLE_LANES, self.code) for exact in found], whole

    def joint(self) -> Mod | None:
        joint = self.call.data["joint"]
        return Mod(joint, self.call.inputs.score_captures) if joint else None


def _call(query: Tensor, key: Tensor, value: Tensor, tensors: Any, text: str, code: str) -> _Call:
    call = call_text.load(text, tensors, Programs)
    check_served(call.inputs, SERVES)
    if call.inputs.kv_scales:  # what they stand for
        key, value = (
            t.double() * scale.unsqueeze(-1)
            for t, scale in zip((key, value), call.inputs.kv_scales, strict=True)
        )
    return _Call(query, key, value, call, code)


@torch.no_grad()
def _forward(*args: Any) -> Tensor:
    call, (out, rows, names) = _call(*args[:6]), args[6:]
    given = {"out": out, **dict(zip(names, rows, strict=True))}
    parts, _ = call.parts()
    for part in parts:
        rows = _sampled(part, part.sizes[2])
        region = part.region(m=rows)
        _check_blocks(part.exact, region)
        gold = part.exact.forward(region)
        for name, tensor in given.items():
            _compare(part, name, part.rows(tensor), gold[name], rows)
    if call.call.inputs.tile_map is not None:
        for name, tensor in given.items():
            _check_rest(call, name, tensor, call.call.inputs.tile_map.queries)
    return out.clone()


@torch.no_grad()
def _backward(*args: Any) -> list[Tensor]:
    call = _call(*args[:6])
    upstream, grads = (*args[6:10], call.call.inputs.grad_entropy), args[10]
    found = iter(grads)
    wants = "".join(
        name for name, whole in zip(("q", "k", "v"), QKV, strict=True) if whole in call.call.wants
    )
    got = {f"d_{name}": next(found) for name in wants}
    captured = {i: next(found) for i, wanted in enumerate(call.call.wanted_captures) if wanted}
    mod, tile_map = call.joint(), call.call.inputs.tile_map
    leaves = None if mod is None else Leaves(mod, score_dtype(call.query.dtype))
    parts, all_of_it = call.parts()
    for part in parts:
        rows, keys = (_sampled(part, size) for size in part.sizes[2:])
        of_part = tuple(map(part.rows, upstream))
        sampled = [({"m": rows}, "q"), ({"n": keys}, "kv")]
        for region, names in [({}, "qkv")] if part.whole else sampled:
            wanted = "".join(name for name in names if name in wants)
            results = part.exact.backward(part.region(**region), of_part, wanted, leaves)
            for name, gold in results.items():
                take, where = (part.rows, rows) if name == "d_q" else (part.keys, keys)
                _compare(part, name, take(got[name]), gold, where)
    if tile_map is not None:
        for name, tensor in got.items():
            _check_rest(call, name, tensor, tile_map.queries if name == "d_q" else tile_map.keys)
    if leaves is not None and captured:
        if all_of_it:
            _compare_captured(call, captured, leaves)
        elif tile_map is None:
            _check_some_captured(call, parts[0].exact, leaves.joint, upstream, captured)
        else:
            _warn_of(call, captured)
    return [grad.clone() for grad in grads]


def _forward_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[6])


def _backward_fake(*args: Any) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in args[-1]]


_CALL = "Tensor query, Tensor key, Tensor value, Tensor[] tensors, str call, str code"
define(
    "verified_forward",
    f"({_CALL}, Tensor out, Tensor[] rows, str[] names) -> Tensor",
    _forward,
    _forward_fake,
)
define(
    "verified_backward",
    f"({_CALL}, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, Tensor[] grads) -> Tensor[]",
    _backward,
    _backward_fake,
)


def _sampled(part: _Part, length: int) -> list[slice]:
    """Tiles of rows or keys: all of them in small calls, else some, the first and the last among them."""
    starts: Sequence[int] = range(0, length, TILE)
    if not part.whole and length:
        chosen = [0, *(_places.randrange(length) for _ in range(SAMPLES - 2)), length - 1]
        starts = sorted({start // TILE * TILE for start in chosen})
    return [slice(start, min(start + TILE, length)) for start in starts]


def _check_some_captured(
    call: _Call, exact: Exact, mod: Mod, upstream: tuple[Tensor, ...], captured: dict[int, Tensor]
) -> None:
    """Of a large call's captured gradients, those elements that only a bounded number of lanes add to."""
    left = set(captured)
    for axes in dict.fromkeys(leaf.axes for leaf in mod.wide.leaves):
        if (region := _region_along(call, axes)) is None:
            continue
        if (incomplete := _incomplete(call, mod, axes, region)) is not None:
            leaves = Leaves(mod, exact.dtype)
            exact.backward(region, upstream, "", leaves)
            leaves.forget(incomplete)
            left -= _compare_captured(call, captured, leaves)
    if left:
        _warn_of(call, left)


def _warn_of(call: _Call, captured: Iterable[int]) -> None:
    shapes = [list(call.call.inputs.score_captures[i].shape) for i in sorted(captured)]
    warnings.warn(errors.captures_not_verified(shapes, call.lanes, WHOLE_LANES), stacklevel=3)


def _check_rest(call: _Call, name: str, got: Tensor, lines: Tensor) -> None:
    """Rows that no tile has are 0, but for what UNSEEN says."""
    free = torch.ones(got.size(0), got.size(2), dtype=torch.bool, device=got.device)
    side = Side.of(lines, (lines[:, COUNT] > 0).nonzero().flatten())
    free[side.batch, side.row] = False
    want = UNSEEN.get(name, 0.0)
    wrong = (got != want) & (free[:, None, :, None] if got.dim() == 4 else free[:, None])
    for place in wrong.nonzero().tolist()[:1]:
        tile = [(i, i + 1) for i in place[:3]]
        raise errors.kernel_differs(name, tile, place, got[tuple(place)].item(), want, 0.0, call.code)


def _region_along(call: _Call, axes: Sequence[str]) -> Region | None:
    """The lanes that add to the elements for some positions along `axes`, if they are few enough."""
    spans = [slice(0, size) for size in call.sizes]
    for axis in ("q_idx", "kv_idx", "h", "b"):
        i = AXES.index(axis)
        lanes = _lanes(spans)
        if axis in axes and lanes > WHOLE_LANES:
            length = max(1, call.sizes[i] * WHOLE_LANES // lanes)
            start = _places.randrange(call.sizes[i] - length + 1)
            spans[i] = slice(start, start + length)
    b, h, m, n = spans
    return Region(b, h, [m], [n]) if _lanes(spans) <= WHOLE_LANES else None


def _incomplete(call: _Call, mod: Mod, axes: Sequence[str], region: Region) -> list[Tensor] | None:
    """For each leaf, the elements to which lanes outside of the region add; None if that takes too long to find."""
    spans = [region.b, region.h, *region.m, *region.n]
    flags = []
    for i, leaf in enumerate(mod.wide.leaves):
        if leaf.axes != axes or not leaf.indices:
            flags.append(torch.ones((), dtype=torch.bool, device=call.query.device))
            continue
        everywhere = [slice(0, n if axis in axes else 1) for axis, n in zip(AXES, call.sizes, strict=True)]
        inside = [span if axis in axes else slice(0, 1) for axis, span in zip(AXES, spans, strict=True)]
        if _lanes(everywhere) > WHOLE_LANES:
            return None
        try:
            counts = [_additions(call, mod, i, part) for part in (everywhere, inside)]
        except (IndexError, RuntimeError):  # lanes that are masked out may hold any index
            return None
        flags.append(counts[0] != counts[1])
    return flags


def _additions(call: _Call, mod: Mod, i: int, spans: Sequence[slice]) -> Tensor:
    """How many positions in `spans` add to each element of a leaf."""
    device = call.query.device
    lanes = {
        axis: torch.arange(at.start, at.stop, dtype=torch.int32, device=device)
        for axis, at in zip(AXES, spans, strict=True)
    }
    score = torch.zeros([len(t) for t in lanes.values()], dtype=torch.float64, device=device)
    outputs = mod.exact({"score": score, "grad_score": score, **lanes}, None)
    before = sum(1 + leaf.indices for leaf in mod.wide.leaves[:i])
    first = 1 + before + 1
    shape = Leaves(mod, torch.float64).shapes[i][: mod.wide.leaves[i].indices]
    at = offsets(outputs[first : first + mod.wide.leaves[i].indices], shape).reshape(-1)
    size = torch.Size(shape).numel()
    return torch.bincount(at[(at >= 0) & (at < size)], minlength=size)


def _lanes(spans: Sequence[slice]) -> int:
    return math.prod(span.stop - span.start for span in spans)


def _check_blocks(exact: Exact, region: Region) -> None:
    """Blocks that heads or batches share must agree with mask_mod for each of them."""
    if exact.visited is None or exact.mask_mod is None:
        return
    shared = [i for i in (0, 1) if exact.visited.grids[i] == 1 < exact.query.size(i)]
    for tile in exact.tiles(region) if shared else ():
        first = tile._replace(**{"bh"[i]: slice(0, 1) for i in shared})
        try:
            each, one = (
                exact.mask_mod.rounded(exact.indices(t), None, exact.dtype)[0] for t in (tile, first)
            )
        except (IndexError, RuntimeError):  # lanes that are not visited may hold any index
            return
        if all(each.stride(i) == 0 or each.size(i) == 1 for i in shared):
            continue
        visited, full = exact.visited.lanes(*tile)
        decided = torch.where(one, full, ~visited)
        wrong = (each != one) & decided
        if wrong.any():
            place = [int(i[0]) + at.start for i, at in zip(wrong.nonzero(as_tuple=True), tile, strict=True)]
            raise errors.blocks_not_for_all(["BH"[i] for i in shared], place)


def _compare(part: _Part, name: str, got: Tensor, gold: Bounded, rows: Sequence[slice]) -> None:
    """Raise for the first tile of `rows` in which `got` is not within the bounds."""
    for b in range(got.size(0)):
        for h in range(got.size(1)):
            for at in rows:
                where = (slice(b, b + 1), slice(h, h + 1), at)
                _compare_tile(part.code, name, got, gold, where, part.sequence)


def _compare_captured(call: _Call, captured: dict[int, Tensor], leaves: Leaves) -> set[int]:
    """The captured gradients that were compared. In a part of a call, NaN means unknown."""
    eps = torch.finfo(leaves.dtype).eps
    golds = leaves.gradients(call.call.inputs.score_captures, sum(call.sizes[2:]), eps)
    compared = set()
    for i, got in captured.items():
        gold = golds[i]
        if leaves.incomplete:
            known = ~gold.value.isnan()
            gold = Bounded(gold.value.where(known, got.double()), gold.error.where(known, 0.0))
            if not known.any():
                continue
        compared.add(i)
        _compare_tile(call.code, f"d_captures[{i}]", got, gold, tuple(slice(0, size) for size in got.shape))
    return compared


def _compare_tile(
    code: str, name: str, got: Tensor, gold: Bounded, where: tuple[slice, ...], sequence: int | None = None
) -> None:
    gold = gold.rounded(got.dtype)
    part, want, allowed = got[where].double(), gold.value[where], gold.error[where]
    off = (part - want).abs()
    # Values beyond the dtype become infinite. Bounds that are NaN allow anything.
    right = torch.where(want.isfinite(), off <= allowed, ~part.isfinite())
    right |= (part == want.to(got.dtype).double()) | (want.isfinite() & allowed.isnan())
    if not right.all():
        worst = torch.where(right, -1.0, (off - allowed).nan_to_num(torch.inf)).argmax()
        at = tuple(int(i) for i in torch.unravel_index(worst, off.shape))
        raise errors.kernel_differs(
            name,
            [(s.start, s.stop) for s in where],
            [s.start + i for s, i in zip(where, at, strict=False)] + list(at[len(where) :]),
            part[at].item(),
            want[at].item(),
            allowed[at].item(),
            code,
            sequence,
        )
