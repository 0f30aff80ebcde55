"""Tiles in an order from dense to sparse, dealt out so that each rank has the mean of the work in two pieces."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate

from torch import Tensor

CLOSE = 0.01  # one piece is enough where its work is this near to the mean
EVEN = 0.045  # a rank that is further above the mean changes tiles with others
ROUNDS = 8
PARTNERS = 16  # that are looked at for a change


def paired(cost: Tensor, part: Tensor, order: Tensor, room: list[int]) -> list[int]:
    """The rank of each tile; rank r has room[r]. `part` says which tiles belong together, such as a document's."""
    costs, parts = cost.tolist(), part.tolist()
    owner = _dealt(costs, parts, order.tolist(), room)
    return _evened(costs, parts, owner, len(room))


def _dealt(cost: list[float], part: list[int], order: list[int], room: list[int]) -> list[int]:
    """Each rank takes from the dense end, and fills up from the sparse end, as much of each as makes the mean."""
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
    """A document begins before `end`: the tiles of it up to there change with its last ones, whose rows read less."""
    opens = closes = end
    while part[order[opens - 1]] == part[order[end]]:
        opens -= 1
    while closes < high and part[order[closes]] == part[order[end]]:
        closes += 1
    split = closes - (end - opens)
    order[opens:closes] = order[split:closes] + order[opens:split]
    sums[opens : closes + 1] = accumulate((cost[tile] for tile in order[opens:closes]), initial=sums[opens])


def _dense(sums: list[float], low: int, high: int, size: int, mean: float) -> int:
    """How many of `size` tiles come from the dense end, so that the work is nearest to the mean."""
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
    """Ranks above the mean change tiles with others, at first with those that share the part of their dearest tile."""
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
            changed |= any(_change(heavy, light, cost, held, load, most) for light in lighter)
        if not changed:
            break


def _change(
    heavy: int, light: int, cost: list[float], held: list[list[int]], load: list[float], most: float
) -> bool:
    """The two tiles whose change makes the ranks most alike, or the cheapest that make them alike enough."""
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
