"""What each method would take on many ranks, by the cost model. It is a model: nothing here was measured.

Exchanges are either hidden behind computing as far as they fit, or not at all; what runs lies between the two. Only the
ring overlaps by itself. Ranks are compared by what they do over all masks, and those of a ring step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import planning_errors as errors
from .cost import CostModel
from .work import TileWork, on_host

METHODS = ("all_gather", "ring", "ulysses", "cast", "ring_ulysses")
NODE = 8  # ranks that share heads in ring_ulysses


class Phase(NamedTuple):
    """Forward or backward, in seconds; bytes are those that the busiest rank gets or sends, whichever is more."""

    perfect: float  # the mean of the ranks' computing
    compute: float  # of the rank that computes most
    exchange: float
    hidden: float  # all in all, where exchanges run behind computing
    exposed: float  # where nothing overlaps
    bytes: float

    @property
    def efficiency(self) -> float:
        """The share of perfect scaling with hidden exchanges."""
        return self.perfect / self.hidden if self.hidden else 1.0

    @property
    def efficiency_exposed(self) -> float:
        return self.perfect / self.exposed if self.exposed else 1.0


@dataclass(frozen=True)
class Estimate:
    method: str
    ranks: int
    imbalance: float  # the most work of a rank over the mean
    forward: Phase
    backward: Phase
    memory: float  # bytes of the keys and values that a call attends to and of their gradients, where they are most

    @property
    def seconds(self) -> float:
        """Forward and backward, with what overlaps by itself."""
        if self.method in ("ring", "ring_ulysses"):
            return self.forward.hidden + self.backward.hidden
        return self.forward.exposed + self.backward.exposed


def refusal(method: str, ranks: int, model: CostModel, node: int | None = None) -> str | None:
    """Why a method cannot run, or None. `node` ranks share heads in ring_ulysses, or as many as can."""
    if method == "ulysses" and model.heads % ranks:
        return f"{model.heads} heads do not divide by {ranks} ranks"
    if method == "ring_ulysses" and node is not None and model.heads % node:
        return f"{model.heads} heads do not divide by the {node} ranks that share them"
    if method == "ring_ulysses" and node is None and not 1 < _node(ranks, model) < ranks:
        return f"no node of 2 to {NODE} ranks divides {ranks} ranks and {model.heads} heads"
    return None


@on_host
def estimate(
    work: TileWork,
    owner: Sequence[int],
    ranks: int,
    method: str,
    model: CostModel | None = None,
    node: int | None = None,
) -> Estimate:
    """`owner` is the rank of each tile; for ring_ulysses, the group of `node` ranks: see `groups`."""
    model = CostModel() if model is None else model
    if method == "cast":
        return _cast(work, owner, ranks, model)
    if method == "all_gather":
        return _all_gather(work, owner, ranks, model)
    if method == "ring":
        return _ring(work, owner, ranks, model, 1, "ring")
    if method == "ulysses":
        return _ulysses(work, ranks, model)
    if method != "ring_ulysses":
        raise errors.unknown_method(method, METHODS)
    return _ring(work, owner, ranks, model, node or _node(ranks, model), "ring_ulysses")


def groups(method: str, ranks: int, model: CostModel) -> int:
    """Among how many the tiles are shared out: among all ranks, or the nodes of ring_ulysses."""
    return ranks // _node(ranks, model) if method == "ring_ulysses" else ranks


def _node(ranks: int, model: CostModel) -> int:
    shared = math.gcd(ranks, model.heads)
    return max(size for size in range(1, NODE + 1) if shared % size == 0)


def _tiles(owner: Sequence[int], ranks: int) -> Tensor:
    """How many tiles each rank holds."""
    held = torch.bincount(torch.as_tensor(owner, dtype=torch.int64), minlength=ranks)
    return held.to(torch.float64)


def _cast(work: TileWork, owner: Sequence[int], ranks: int, model: CostModel) -> Estimate:
    loads = work.loads(owner, ranks)
    compute = loads.weights @ loads.work
    moved = (loads.weights @ loads.received).maximum(loads.weights @ loads.sent)
    return _one_exchange("cast", work, model, compute, moved, float(loads.read.max()))


def _all_gather(work: TileWork, owner: Sequence[int], ranks: int, model: CostModel) -> Estimate:
    loads = work.loads(owner, ranks)
    others = work.tiles - _tiles(owner, ranks)
    return _one_exchange(
        "all_gather",
        work,
        model,
        loads.weights @ loads.work,
        others * loads.weights.sum(),
        float(work.tiles),
    )


def _one_exchange(
    method: str, work: TileWork, model: CostModel, compute: Tensor, moved: Tensor, held: float
) -> Estimate:
    """Keys and values come before computing and are kept; their gradients go back after it."""
    there, back = model.bytes_of_tile(work.tile), model.gradient_bytes_of_tile(work.tile)
    phases = [
        _phase(
            compute * model.seconds_of_tile(work.tile, backward),
            moved * size / model.bandwidth,
            float(moved.max() * size),
        )
        for backward, size in ((False, there), (True, back))
    ]
    ratio = float(compute.max() / compute.mean()) if compute.any() else 1.0
    return Estimate(method, compute.numel(), ratio, phases[0], phases[1], held * (there + back))


def _phase(compute: Tensor, exchange: Tensor, most: float) -> Phase:
    return Phase(
        float(compute.mean()),
        float(compute.max()),
        float(exchange.max()),
        float(compute.maximum(exchange).max()),
        float((compute + exchange).max()),
        most,
    )


def _ulysses(work: TileWork, ranks: int, model: CostModel) -> Estimate:
    """Each rank has all tokens of some heads, so that work is even."""
    weight = sum(mask.weight for mask in work.masks)
    compute = torch.full((ranks,), float(work.cost.sum()) / ranks, dtype=torch.float64)
    forward, backward, memory = _of_heads(work, ranks, ranks, model)
    phases = [
        _phase(
            compute * model.seconds_of_tile(work.tile, backward),
            torch.full((ranks,), weight * size / model.bandwidth, dtype=torch.float64),
            weight * size,
        )
        for backward, size in ((False, forward), (True, backward))
    ]
    return Estimate("ulysses", ranks, 1.0, phases[0], phases[1], memory)


def _of_heads(work: TileWork, ranks: int, node: int, model: CostModel) -> tuple[float, float, float]:
    """Bytes that a rank gets when `node` ranks exchange tokens for heads: forward, backward, and what it holds then."""
    score, value = model.dims
    kv_heads = max(model.kv_heads, node)  # repeated where there are fewer than ranks
    tokens = model.batch * work.length / ranks * (node - 1) / node
    queries, out = model.heads * score * model.itemsize, model.heads * value * model.itemsize
    moved = tokens * (queries + kv_heads * (score + value) * model.itemsize + out)
    return moved, moved, 2 * moved + tokens * (queries + out)


def _ring(
    work: TileWork, owner: Sequence[int], ranks: int, model: CostModel, node: int, method: str
) -> Estimate:
    """Blocks go from each group to the next, as far as one needs them; a node shares the heads of its group."""
    count = ranks // node
    computes, reads = work.between(owner, count)
    block = _tiles(owner, count)
    # Heads of keys and values that several ranks of the node need are repeated.
    share = max(1, node // model.kv_heads) / node
    keys, gradients = (
        f(work.tile) * share * block for f in (model.bytes_of_tile, model.gradient_bytes_of_tile)
    )
    phases = []
    for backward in (False, True):
        seconds = model.seconds_of_tile(work.tile, backward) / node
        moving, back = (keys + gradients, gradients) if backward else (keys, torch.zeros_like(keys))
        every = [
            [mask.weight * x for x in _round(done * seconds, read, moving, back, model)]
            for mask, done, read in zip(work.masks, computes.to(torch.float64), reads, strict=True)
        ]
        phases.append(Phase(*(sum(x) for x in zip(*every, strict=True))))
    memory = 2 * float((keys + gradients).max())
    if node > 1:
        weight = sum(mask.weight for mask in work.masks)
        *moved, held = _of_heads(work, ranks, node, model)
        phases = [_after(p, weight * size, model) for p, size in zip(phases, moved, strict=True)]
        memory += held
    total = sum(mask.weight * done.sum(1) for mask, done in zip(work.masks, computes, strict=True))
    ratio = float(total.max() / total.mean()) if total.any() else 1.0
    return Estimate(method, ranks, ratio, phases[0], phases[1], memory)


def _round(compute: Tensor, reads: Tensor, moving: Tensor, back: Tensor, model: CostModel) -> Phase:
    """Of one mask. At step s rank r has the block of rank r - s; from the last that needs it `back` goes home.

    `compute` [ranks, ranks] is in seconds, what each rank does with each block; `moving` is how large the blocks are.
    """
    rank = torch.arange(moving.numel())
    step = rank[:, None]
    holder = (rank - step) % rank.numel()  # [step, rank]
    far = torch.zeros_like(rank)
    far.scatter_reduce_(0, holder.flatten(), torch.where(reads[rank, holder], step, 0).flatten(), "amax")
    arrives = torch.where((step > 0) & (step <= far[holder]), moving[holder], 0.0)
    home = torch.where(far > 0, back, 0.0)
    done, sent = compute[rank, holder].max(1).values, arrives.max(1).values / model.bandwidth
    last = float(home.max()) / model.bandwidth
    meanwhile = torch.nn.functional.pad(sent[1:], (0, 1))  # the next block comes during a step
    return Phase(
        float(compute.sum(1).mean()),
        float(compute.sum(1).max()),
        float(sent.sum()) + last,
        float(done.maximum(meanwhile).sum()) + last,
        float((done + sent).sum()) + last,
        float((arrives.sum(0) + home).max()),
    )


def _after(phase: Phase, size: float, model: CostModel) -> Phase:
    """With an exchange before or after it that nothing hides."""
    seconds = size / model.bandwidth
    return phase._replace(
        exchange=phase.exchange + seconds,
        hidden=phase.hidden + seconds,
        exposed=phase.exposed + seconds,
        bytes=phase.bytes + size,
    )


def log_normal_documents(length: int, mean: float = 16384, sigma: float = 1.0, seed: int = 0) -> list[int]:
    """Lengths of documents that fill the sequence, the last one cut."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = []
    left = length
    while left > 0:
        draw = float(torch.randn((), generator=generator))
        found.append(min(left, max(1, int(mean * math.exp(sigma * draw - sigma**2 / 2)))))
        left -= found[-1]
    return found
