"""Which rank gets which tile: a balancer takes the work of the tiles and the number of ranks.

Those here give each rank as many tiles as any other, or one more, so that the rest of a model is balanced too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import errors
from .cost import CostModel, estimate
from .work import TileWork, on_host

Balancer = Callable[[TileWork, int], Sequence[int]]
CLOSE = 0.01  # one piece is enough if its work is this near the mean
EVEN = 0.045  # ranks further above the mean swap tiles with others
ROUNDS = 8
PARTNERS = 16  # considered for a swap


def contiguous(work: TileWork, ranks: int) -> list[int]:
    """Neighbouring tiles together."""
    return torch.repeat_interleave(_shares(work.tiles, ranks)).tolist()


def head_tail(work: TileWork, ranks: int) -> list[int]:
    """Rank r has the r-th part from the front and the r-th from the back: a causal mask gives all the same work."""
    shares = _shares(work.tiles, ranks)
    ends = shares.cumsum(0)
    before = ends - shares
    front, back = (ends + 1) // 2 - (before + 1) // 2, ends // 2 - before // 2
    order = torch.arange(ranks)
    owner = torch.cat([torch.repeat_interleave(order, front), torch.repeat_interleave(order, back).flip(0)])
    return owner.tolist()


def documents(work: TileWork, ranks: int) -> list[int]:
    """Each document head-tail over all ranks. A document is a stretch of rows that begin at one column."""
    document, place, length = stretches(work)
    folded = fold(place, length)
    # Each rank has `least` tiles of a document, and `more` ranks from `turn` on have one more. `turn` moves on by
    # document.
    sizes = torch.bincount(document)
    turn = ((sizes % ranks).cumsum(0) - sizes % ranks)[document] % ranks
    least, more = length // ranks, length % ranks
    long = more * (least + 1)
    late = more + (folded - long) // least.clamp(min=1)
    owner = torch.where(folded < long, folded // (least + 1), late)
    return ((owner + turn) % ranks).tolist()


def work(work: TileWork, ranks: int) -> list[int]:
    """The longest tiles first, each to the rank that has the least to do: even, and blind to what is sent."""
    room = _shares(work.tiles, ranks).tolist()
    cost = work.cost.tolist()
    waiting = [(0.0, rank) for rank in range(ranks) if room[rank]]
    owner = [0] * work.tiles
    for tile in work.cost.argsort(descending=True, stable=True).tolist():
        load, rank = waiting[0]
        owner[tile] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(waiting, (load + cost[tile], rank))
        else:
            heapq.heappop(waiting)
    return owner


def work_and_bytes(work: TileWork, ranks: int) -> list[int]:
    """Even work in few pieces: each rank has neighbouring tiles of a long document, and of short ones to fill up."""
    first, stop = work.hull
    part = components(first, stop)
    density = torch.zeros_like(work.cost).index_add_(0, part, work.cost)
    density = (density / torch.bincount(part, minlength=work.tiles).clamp(min=1))[part]
    _, place, length = stretches(work)
    # Within a document by head and tail in turn: then ranks send as evenly as they receive.
    order = (torch.arange(work.tiles) - place + fold(place, length)).argsort()
    order = order[density[order].argsort(descending=True, stable=True)]
    return paired(work.cost, part, order, _shares(work.tiles, ranks).tolist())


def auto(work: TileWork, ranks: int) -> Sequence[int]:
    """The one that takes the least time by the model, with cast; the simplest of those that are close."""
    return best(work, ranks)[1]


@on_host
def best(
    work: TileWork, ranks: int, model: CostModel | None = None, method: str = "cast"
) -> tuple[str, Sequence[int]]:
    """The name and the owners that `auto` takes, for a method and a model."""
    model = CostModel() if model is None else model
    method = "ring" if method == "ring_ulysses" else method  # its ranks wait for each other alike
    found: list[tuple[float, str, Sequence[int]]] = []
    for name in ("contiguous", "head_tail", "documents", "work_and_bytes"):
        owner = BALANCERS[name](work, ranks)
        found.append((estimate(work, owner, ranks, method, model).seconds, name, owner))
    least = min(seconds for seconds, _, _ in found)
    return next((name, owner) for seconds, name, owner in found if seconds <= 1.02 * least)


BALANCERS: dict[str, Balancer] = {
    "auto": auto,
    "contiguous": contiguous,
    "head_tail": head_tail,
    "documents": documents,
    "work": work,
    "work_and_bytes": work_and_bytes,
}


@on_host
def owners(
    balance: Any, work: TileWork, ranks: int, model: CostModel | None = None, method: str = "cast"
) -> tuple[int, ...]:
    """The rank of each tile, by a name, a function (work, ranks) -> owners, or one of torch's load balancers.

    "auto" weighs work and bytes by `model`, for `method`.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise errors.bad_ranks(ranks)
    if isinstance(balance, str):
        if balance not in BALANCERS:
            raise errors.unknown_balance(balance, BALANCERS)
        return tuple(
            best(work, ranks, model, method)[1] if balance == "auto" else BALANCERS[balance](work, ranks)
        )
    name = type(balance).__name__
    if hasattr(balance, "_generate_indices"):
        return _by_order(name, balance._generate_indices(), work, ranks)
    if not callable(balance):
        raise errors.unknown_balance(balance, BALANCERS)
    name = getattr(balance, "__name__", name)
    given = balance(work, ranks)
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise errors.bad_owners(name, repr(given)[:80], work.tiles, ranks) from None
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.dim() != 1 or (found.numel() and not whole):
        raise errors.bad_owners(name, f"{found.dtype} of shape {list(found.shape)}", work.tiles, ranks)
    if found.numel() != work.tiles or (found.numel() and not (found.min() >= 0 and found.max() < ranks)):
        ends = [int(x) for x in found.aminmax()] if found.numel() else []
        raise errors.bad_owners(name, f"{found.numel()} entries, least and most {ends}", work.tiles, ranks)
    return tuple(found.tolist())


def _by_order(name: str, order: Tensor | None, work: TileWork, ranks: int) -> tuple[int, ...]:
    """Owners from torch's order [1 or batch, tokens]: each rank has an equal part of it."""
    if order is None or order.dim() != 2 or order.size(1) != work.length or (order != order[:1]).any():
        what = "none" if order is None else f"{list(order.shape)}"
        raise errors.other_order(name, what, work.length)
    at = order[0].long().cpu()
    if work.length % ranks or not torch.equal(at.sort().values, torch.arange(work.length)):
        raise errors.other_order(
            name, f"{work.length} tokens for {ranks} ranks, or not each once", work.length
        )
    rank = torch.empty_like(at)
    rank[at] = torch.arange(work.length) // (work.length // ranks)
    tile = torch.arange(work.length) // work.tile
    owner = rank[:: work.tile]
    split = (rank != owner[tile]).nonzero()
    if split.numel():
        low, high = sorted((int(rank[split[0]]), int(owner[tile[split[0]]])))
        raise errors.splits_tiles(name, work.tile, low, high)
    return tuple(owner.tolist())


def stretches(work: TileWork) -> tuple[Tensor, Tensor, Tensor]:
    """Stretches of rows that begin at the same column: for each row its stretch, its place there, and the stretch's
    length."""
    first, _ = work.hull
    opens = torch.ones_like(first, dtype=torch.bool)
    opens[1:] = first[1:] != first[:-1]
    stretch = opens.cumsum(0) - 1
    place = torch.arange(first.numel()) - opens.nonzero().squeeze(1)[stretch]
    return stretch, place, torch.bincount(stretch)[stretch] if first.numel() else first


def fold(place: Tensor, length: Tensor) -> Tensor:
    """The place in the order first, last, second, second but one, and so on."""
    return torch.where(2 * place < length, 2 * place, 2 * (length - 1 - place) + 1)


def components(first: Tensor, stop: Tensor) -> Tensor:
    """The part of each row: rows that belong together. A part ends where no row reads across, or only that of a shared
    tile."""
    tiles = first.numel()
    own = torch.arange(tiles)
    below = torch.nn.functional.pad(first.flip(0).cummin(0).values.flip(0), (0, 1), value=tiles)
    above = torch.nn.functional.pad(stop.cummax(0).values, (1, 0))[:-1]
    opens = (below[:-1] >= own) & (above <= own)
    shared = (below[1:] >= own) & (above <= own + 1) & (first < own)
    opens[1:] |= shared[:-1]
    return (opens.cumsum(0) - 1).clamp(min=0)


def _shares(tiles: int, ranks: int) -> Tensor:
    """How many tiles each rank gets."""
    return (torch.arange(ranks + 1) * tiles // ranks).diff()


def paired(cost: Tensor, part: Tensor, order: Tensor, room: list[int]) -> list[int]:
    """The rank of each tile; rank r has room[r]. `part` says which tiles belong together, such as a document's."""
    costs, parts = cost.tolist(), part.tolist()
    owner = _dealt(costs, parts, order.tolist(), room)
    return _evened(costs, parts, owner, len(room))


def _dealt(cost: list[float], part: list[int], order: list[int], room: list[int]) -> list[int]:
    """Each rank takes tiles from the dense end and fills up from the sparse end, so that its work is the mean."""
    owner = [0] * len(order)
    sums = [0.0, *accumulate(cost[tile] for tile in order)]
    low, high = 0, len(order)  # what is left
    for rank, size in enumerate(room):
        mean = (sums[high] - sums[low]) / (len(room) - rank)
        taken = _dense(sums, low, high, size, mean)
        end = low + taken
        if low < end < high and part[order[end - 1]] == part[order[end]] != part[order[low]]:
            _turn(cost, part, order, sums, end, high)
        fill = high - (size - taken)
        for tile in (*order[low:end], *order[fill:high]):
            owner[tile] = rank
        low, high = end, fill
    return owner


def _turn(
    cost: list[float], part: list[int], order: list[int], sums: list[float], end: int, high: int
) -> None:
    """Where `end` cuts a document in two, swap its tiles before the cut for its last ones, whose rows read less."""
    opens = closes = end
    while part[order[opens - 1]] == part[order[end]]:
        opens -= 1
    while closes < high and part[order[closes]] == part[order[end]]:
        closes += 1
    split = closes - (end - opens)
    order[opens:closes] = order[split:closes] + order[opens:split]
    sums[opens : closes + 1] = accumulate((cost[tile] for tile in order[opens:closes]), initial=sums[opens])


def _dense(sums: list[float], low: int, high: int, size: int, mean: float) -> int:
    """How many of `size` tiles to take from the dense end for work nearest to the mean."""
    if sums[low + size] - sums[low] <= mean * (1 + CLOSE):
        return size

    def beyond(taken: int) -> float:
        return sums[low + taken] - sums[low] + sums[high] - sums[high - size + taken] - mean

    least, most = 0, size
    while most - least > 1:
        middle = (least + most) // 2
        if beyond(middle) > 0:
            most = middle
        else:
            least = middle
    return most if abs(beyond(most)) < abs(beyond(least)) else least


def _evened(cost: list[float], part: list[int], owner: list[int], ranks: int) -> list[int]:
    """Ranks above the mean swap tiles with others, first with ranks that share the part of their dearest tile."""
    held: list[list[int]] = [[] for _ in range(ranks)]  # by rising cost
    load = [0.0] * ranks
    for tile in sorted(range(len(cost)), key=cost.__getitem__):
        held[owner[tile]].append(tile)
        load[owner[tile]] += cost[tile]
    # No rank can have less than its dearest tile.
    most = max(sum(load) / ranks * (1 + EVEN), max(cost, default=0.0))
    holding = [rank for rank in range(ranks) if held[rank]]
    sharing: dict[int, list[int]] = {}
    for rank in holding:
        sharing.setdefault(part[held[rank][-1]], []).append(rank)
    for some in (*sharing.values(), holding):
        _even(some, cost, held, load, most)
    for rank, tiles in enumerate(held):
        for tile in tiles:
            owner[tile] = rank
    return owner


def _even(some: list[int], cost: list[float], held: list[list[int]], load: list[float], most: float) -> None:
    for _ in range(ROUNDS):
        by_load = sorted(some, key=load.__getitem__)
        above = [rank for rank in reversed(by_load) if load[rank] > most]
        step = max(1, (len(some) - len(above)) // PARTNERS)
        changed = False
        for at, heavy in enumerate(above):
            lighter = by_load[at % step : len(some) - len(above) : step]
            changed |= any(_swapped(heavy, light, cost, held, load, most) for light in lighter)
        if not changed:
            break


def _swapped(
    heavy: int, light: int, cost: list[float], held: list[list[int]], load: list[float], most: float
) -> bool:
    """Swap two tiles if that makes the ranks more alike: the cheapest of those that do enough, else the best two."""
    offered = [cost[tile] for tile in held[light]]
    middle = (load[heavy] - load[light]) / 2
    close = most - (load[heavy] + load[light]) / 2
    least, pair = middle * 0.99, None
    for at, tile in enumerate(held[heavy]):
        near = bisect_left(offered, cost[tile] - middle)
        for other in range(max(0, near - 1), min(near + 1, len(offered))):
            off = abs(cost[tile] - offered[other] - middle)
            if off < least:
                least, pair = off, (at, other)
        if least <= close:
            break  # dearer tiles read more
    if pair is None:
        return False
    given, taken = held[heavy].pop(pair[0]), held[light].pop(pair[1])
    insort(held[heavy], taken, key=cost.__getitem__)
    insort(held[light], given, key=cost.__getitem__)
    load[heavy] += cost[taken] - cost[given]
    load[light] += cost[given] - cost[taken]
    return True
