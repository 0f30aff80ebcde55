"""A call whose keys are spread over ranks and arrive at the queries block by block, around a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

HALVES = 2
# "forward" and "backward" of a call, given its ring: by distributed/ring.py once imported.
computed_by: dict[str, Callable[[Ring, Any], Any]] = {}


class Ring(NamedTuple):
    """The call's schedule and map have a part for each step, one after the other along the schedule's batch dimension.

    The keys of each rank are two blocks, its halves. At steps 2 s and 2 s + 1 a rank has those of the rank s before it.
    Tensors are int64 and on the CPU.
    """

    group: str
    rank: int
    plan: Tensor  # the plan's number, the same on all ranks, and one for each time that it is made
    lengths: Tensor  # [ranks, HALVES], of keys
    hops: Tensor  # [ranks], over how many ranks the blocks of each travel
    visits: Tensor  # at each step, whether a query of this rank visits one of the keys
