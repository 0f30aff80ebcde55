"""What lanes add into the leaves of a joint program, and from there into the gradients of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .bounded import OPERATIONS, Bounded, Scores, size_of
from .mods import Mod, apart


class Leaves:
    def __init__(self, joint: Mod, dtype: torch.dtype):
        self.joint, self.dtype, self.incomplete = joint, dtype, False
        self.shapes: list[list[int]] = [
            [
                int(joint.wide_invariants[size] if invariant else size)
                for size, invariant in zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            ]
            for leaf in joint.wide.leaves
        ]
        # Five for each leaf: exact, in the mod's own dtypes, of errors that lanes share, of the other errors' squares,
        # and of magnitudes.
        self.sums: dict[int, list[Tensor]] = {}

    def add(
        self,
        indices: dict[str, Tensor],
        scores: Scores,
        grad: Tensor,
        alone: Tensor,
        shared: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Adds up what a tile contributes; gives the gradient of its raw scores and how far that may be off.

        The gradients of its scores come with two errors: their own, and what all of a row have.
        """
        live = scores.live
        lanes = {"score": scores.raw, "grad_score": grad, **indices}
        found = self.joint.exact(lanes, live)
        ends = [
            self.joint.exact({**lanes, "score": scores.raw + by}, live) for by in (scores.off, -scores.off)
        ]
        # It is linear in grad_score.
        by_grads = self.joint.exact({**lanes, "grad_score": alone + shared}, live)
        part_shared = (shared / (alone + shared)).nan_to_num(0.0)
        bounded: list[tuple[Tensor, ...]] = []
        errors = self.joint.error(lanes, live, self.dtype, found)
        for value, first, second, by_grad, (plain, error) in zip(found, *ends, by_grads, errors, strict=True):
            if not value.is_floating_point():
                bounded.append((value,))
                continue
            shape = (..., *(None,) * (value.dim() - 4))
            by_grad, of_it = size_of(by_grad), part_shared[shape]
            ulps = OPERATIONS * torch.finfo(self.dtype).eps * (size_of(value) + size_of(grad)[shape])
            off = torch.maximum(apart(first, value), apart(second, value)) + (1 - of_it) * by_grad + ulps
            parts = (value, plain, of_it * by_grad + error, off)
            bounded.append(tuple(t.double().where(live[shape], 0.0) for t in parts))
        rest = bounded[1:]
        for i, leaf in enumerate(self.joint.wide.leaves):
            contribution, places, rest = rest[0], rest[1 : 1 + leaf.indices], rest[1 + leaf.indices :]
            self._put(i, contribution, [place for (place,) in places], live)
        value, _, together, off = bounded[0]
        return value, together + off

    def _put(self, i: int, contribution: tuple[Tensor, ...], indices: list[Tensor], live: Tensor) -> None:
        value, plain, together, off = contribution
        parts = [value, plain, together, off.square(), value.abs()]
        if not indices:
            parts = [part.sum((0, 1, 2, 3)) for part in parts]
            self.sums[i] = [*map(torch.add, self.sums[i], parts)] if i in self.sums else parts
            return
        places, row = self.shapes[i][: len(indices)], self.shapes[i][len(indices) :]
        at = torch.where(live, offsets(indices, places), 0).reshape(-1)
        if i not in self.sums:
            self.sums[i] = [value.new_zeros(math.prod(places), *row) for _ in parts]
        for total, part in zip(self.sums[i], parts, strict=True):
            total.index_add_(0, at, part.expand(*live.shape, *row).flatten(0, 3))

    def forget(self, incomplete: Sequence[Tensor]) -> None:
        """Sets to NaN the elements of each leaf to which other lanes add as well, and so all that depends on them."""
        self.incomplete = True
        for i, parts in self.sums.items():
            for part in parts:
                rows = (..., *(None,) * (part.dim() - incomplete[i].dim()))
                part.masked_fill_(incomplete[i][rows], math.nan)

    def gradients(self, captures: Sequence[Tensor], count: int, eps: float) -> dict[int, Bounded]:
        """Of the captured tensors that have one; `count` is the most numbers that are added up one after another."""
        joint = self.joint
        wanted = {i: c for i, (c, has) in enumerate(zip(captures, joint.wide.gradients, strict=True)) if has}
        if len(self.sums) < len(self.shapes):  # no lane is live anywhere
            nothing = {
                i: torch.zeros(c.shape, dtype=torch.float64, device=c.device) for i, c in wanted.items()
            }
            return {i: Bounded(t, t) for i, t in nothing.items()}
        sums = [
            [part.view(shape) if leaf.indices else part for part in self.sums[i]]
            for i, (leaf, shape) in enumerate(zip(joint.wide.leaves, self.shapes, strict=True))
        ]
        exact, plain, together, squares, magnitudes = zip(*sums, strict=True)
        lost = (OPERATIONS + math.sqrt(count) / 2) * eps
        errors = [
            shared + apart.sqrt() + lost * magnitude
            for shared, apart, magnitude in zip(together, squares, magnitudes, strict=True)
        ]

        def through(sums: Sequence[Tensor]) -> Sequence[Any]:
            return joint.wide.epilogue(*sums, *joint.wide_captures, *joint.wide_invariants)

        value = through(exact)
        rounded = joint.plain.epilogue(
            *(total.to(self.dtype) for total in plain), *joint.plain_captures, *joint.plain_invariants
        )
        # The epilogue is linear: errors of either sign, in some combinations, show how far they reach.
        probes = [through(errors), *(through([e * _signs(e, seed) for e in errors]) for seed in range(3))]
        results = {}
        for i, capture in wanted.items():
            grad = value[i].double().expand(capture.shape)
            off = torch.stack([size_of(probe[i]).expand(capture.shape) for probe in probes]).amax(0)
            off = off + 2 * apart(rounded[i].double().expand(capture.shape), grad)
            results[i] = Bounded(grad, off)
        return results


def offsets(indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Where in a tensor of `shape`, laid out in a row, the element at `indices` is."""
    flat = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    for index, size in zip(indices, shape, strict=True):
        flat = flat * size + torch.where(index < 0, index + size, index)
    return flat


def _signs(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, like.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return signs.to(like.device)
