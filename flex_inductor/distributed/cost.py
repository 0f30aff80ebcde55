"""A model of what each method would take on many ranks, and which one to choose by it. Nothing here was measured.

Exchanges are either hidden behind computing as far as they fit, or not at all; real runs lie between. Only the ring
overlaps by itself. Ranks are compared over all masks, and ranks of a ring step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import errors
from .work import TileWork, on_host

FP32 = 4
METHODS = ("cast", "all_gather", "ulysses", "ring", "ring_ulysses")
CHOSEN_FIRST = ("all_gather", "cast", "ulysses", "ring_ulysses", "ring")  # of those that are close
OF_HEADS = ("ulysses", "ring_ulysses")
CLOSE = 1.05
NODE = 8  # ranks that share heads in ring_ulysses


@dataclass(frozen=True)
class CostModel:
    """The sizes of a model's attention, and the rates of a rank. Rates are assumed to be reached."""

    heads: int = 128
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None  # head_dim by default
    batch: int = 1
    itemsize: int = 2  # of keys and values; their gradients are fp32
    flops: float = 550e12  # a second
    bandwidth: float = 45e9  # bytes a second, in each direction
    memory: float | None = (
        None  # bytes that the keys, values and their gradients of one call may take; None for any
    )

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def seconds_of_tile(self, tile: int, backward: bool = False) -> float:
        """Seconds for the scores of one tile: two matrix products forward, five backward."""
        score, value = self.dims
        products = 3 * score + 2 * value if backward else score + value
        return 2 * products * self.heads * self.batch * tile**2 / self.flops

    def bytes_of_tile(self, tile: int) -> int:
        """Bytes of the keys and values of one tile."""
        return sum(self.dims) * self.kv_heads * self.batch * tile * self.itemsize

    def gradient_bytes_of_tile(self, tile: int) -> int:
        return self.bytes_of_tile(tile) // self.itemsize * FP32


def amount(size: float) -> str:
    """Bytes in words."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


class Phase(NamedTuple):
    """Forward or backward, in seconds. Bytes are the larger of those that the busiest rank gets and sends."""

    perfect: float  # the mean of the ranks' computing
    compute: float  # of the rank that computes most
    exchange: float
    hidden: float  # in all, if exchanges run behind computing
    exposed: float  # if nothing overlaps
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
    """Why a method cannot run, or None. In ring_ulysses `node` ranks share heads, or as many as possible."""
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
    if method not in METHODS:
        raise errors.unknown("method", method, METHODS)
    if method == "ring":
        return _ring(work, owner, ranks, model, 1, "ring")
    if method == "ring_ulysses":
        return _ring(work, owner, ranks, model, node or _node(ranks, model), "ring_ulysses")
    if method == "ulysses":  # each rank has all tokens of some heads, so that work is even
        weight = sum(mask.weight for mask in work.masks)
        compute = torch.full((ranks,), float(work.cost.sum()) / ranks, dtype=torch.float64)
        forward, backward, memory = _of_heads(work, ranks, ranks, model)
        moved = [torch.full((ranks,), weight * size, dtype=torch.float64) for size in (forward, backward)]
    else:  # keys and values come before computing and are kept; their gradients go back after it
        loads = work.loads(owner, ranks)
        compute = loads.weights @ loads.work
        tiles, held = (work.tiles - _tiles(owner, ranks)) * loads.weights.sum(), float(work.tiles)
        if method == "cast":
            tiles = (loads.weights @ loads.received).maximum(loads.weights @ loads.sent)
            held = float(loads.read.max())
        sizes = model.bytes_of_tile(work.tile), model.gradient_bytes_of_tile(work.tile)
        moved, memory = [tiles * size for size in sizes], held * sum(sizes)
    phases = [
        _phase(compute * model.seconds_of_tile(work.tile, is_backward), size, model)
        for is_backward, size in zip((False, True), moved, strict=True)
    ]
    return Estimate(method, ranks, _imbalance(compute), phases[0], phases[1], memory)


def groups(method: str, ranks: int, model: CostModel) -> int:
    """How many owners tiles have: the ranks, or in ring_ulysses the nodes."""
    return ranks // _node(ranks, model) if method == "ring_ulysses" else ranks


def _node(ranks: int, model: CostModel) -> int:
    shared = math.gcd(ranks, model.heads)
    return max(size for size in range(1, NODE + 1) if shared % size == 0)


def _tiles(owner: Sequence[int], ranks: int) -> Tensor:
    """How many tiles each rank holds."""
    held = torch.bincount(torch.as_tensor(owner, dtype=torch.int64), minlength=ranks)
    return held.to(torch.float64)


def _imbalance(compute: Tensor) -> float:
    return float(compute.max() / compute.mean()) if compute.any() else 1.0


def _phase(compute: Tensor, moved: Tensor, model: CostModel) -> Phase:
    """The phase of ranks that compute for so many seconds and exchange so many bytes."""
    exchange = moved / model.bandwidth
    return Phase(
        float(compute.mean()),
        float(compute.max()),
        float(exchange.max()),
        float(compute.maximum(exchange).max()),
        float((compute + exchange).max()),
        float(moved.max()),
    )


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
    """Blocks go from group to group while one needs them; a node shares the heads of its group."""
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
        moving, returning = (keys + gradients, gradients) if backward else (keys, torch.zeros_like(keys))
        every = [
            [mask.weight * x for x in _round(done * seconds, read, moving, returning, model)]
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
    return Estimate(method, ranks, _imbalance(total), phases[0], phases[1], memory)


def _round(compute: Tensor, reads: Tensor, moving: Tensor, returning: Tensor, model: CostModel) -> Phase:
    """The phase of one mask. At step s rank r has the block of rank r - s.

    `compute` [ranks, ranks] is in seconds, what each rank does with each block; `moving` is how large the blocks are.
    The last rank that needs a block sends `returning` of it to its owner.
    """
    rank = torch.arange(moving.numel())
    step = rank[:, None]
    holder = (rank - step) % rank.numel()  # [step, rank]
    hops = torch.zeros_like(rank)
    hops.scatter_reduce_(0, holder.flatten(), torch.where(reads[rank, holder], step, 0).flatten(), "amax")
    arrives = torch.where((step > 0) & (step <= hops[holder]), moving[holder], 0.0)
    returned = torch.where(hops > 0, returning, 0.0)
    done, sent = compute[rank, holder].max(1).values, arrives.max(1).values / model.bandwidth
    last = float(returned.max()) / model.bandwidth
    meanwhile = torch.nn.functional.pad(sent[1:], (0, 1))  # the next block comes during a step
    return Phase(
        float(compute.sum(1).mean()),
        float(compute.sum(1).max()),
        float(sent.sum()) + last,
        float(done.maximum(meanwhile).sum()) + last,
        float((done + sent).sum()) + last,
        float((arrives.sum(0) + returned).max()),
    )


def _after(phase: Phase, size: float, model: CostModel) -> Phase:
    """The phase with one more exchange, which nothing overlaps."""
    seconds = size / model.bandwidth
    return phase._replace(
        exchange=phase.exchange + seconds,
        hidden=phase.hidden + seconds,
        exposed=phase.exposed + seconds,
        bytes=phase.bytes + size,
    )


class MethodChoice(NamedTuple):
    """A method and why, and the others with the reason against each. Decisions print it."""

    plan: str  # what it is for, in a line
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"plan:     {self.plan}", f"chosen:   {self.chosen} ({self.why})"]
        return "\n".join(lines + [f"rejected: {name}: {reason}" for name, reason in self.rejected])


def choose_method(
    work: TileWork,
    owner: Sequence[int],
    ranks: int,
    model: CostModel | None = None,
    *,
    asked: str = "auto",
    node: int | None = None,
) -> MethodChoice:
    """The method `asked` for, or the simplest one that can run and is nearly as fast as the fastest.

    `node` ranks share heads on a mesh of two dimensions, where ring_ulysses is a method too. Ring is chosen if the
    others need more than `model.memory`. Without a `model` sizes are defaults, and the number of heads
    to share is unknown.
    """
    known, model = model is not None, CostModel() if model is None else model
    able: dict[str, Estimate] = {}
    against: dict[str, str] = {}
    for method in CHOSEN_FIRST if node else [method for method in CHOSEN_FIRST if method != "ring_ulysses"]:
        reason = refusal(method, ranks, model, node)
        if reason is None:
            held = [rank // node for rank in owner] if node and method == "ring_ulysses" else owner
            made = estimate(work, held, ranks, method, model, node)
            if method == asked:
                able = {method: made}
            elif asked != "auto":
                reason = "not asked for"
            elif method in OF_HEADS and not known:
                reason = "it shares out heads, and how many there are was not said"
            elif method == "ring" and able:
                reason = "it is for calls whose keys and values do not fit in memory"
            elif method != "ring" and model.memory is not None and made.memory > model.memory:
                reason = f"a call may hold {amount(model.memory)}"
            else:
                able[method] = made
            reason = reason and f"{reason}; {_facts(made)}"
        if reason is not None:
            against[method] = reason
    if asked == "auto":
        least = min(made.seconds for made in able.values())
        chosen = next(method for method, made in able.items() if made.seconds <= CLOSE * least)
        why = _facts(able[chosen])
    else:
        chosen = asked
        why = "; ".join(["asked for", *map(_facts, able.values())])
        against.pop(asked, None)  # a call shows whether it can run
    against |= {method: _facts(made) for method, made in able.items() if method != chosen}
    others = tuple((method, against[method]) for method in CHOSEN_FIRST if method in against)
    masks = f"{len(work.masks)} mask" + ("" if len(work.masks) == 1 else "s")
    plan = f"plan of {masks}, {work.length} tokens in {work.tiles} tiles of {work.tile}, {ranks} ranks"
    return MethodChoice(plan, chosen, why, others)


def _facts(made: Estimate) -> str:
    return (
        f"by the model {1e3 * made.seconds:.3g} ms forward and backward, {amount(made.forward.bytes)} and "
        f"{amount(made.backward.bytes)} moved, {amount(made.memory)} held"
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
