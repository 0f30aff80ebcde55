"""A call whose keys are spread over ranks and come to the queries block by block, around a ring."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ring(NamedTuple):
    """The call's schedule and map have a part for each step, one after the other along the schedule's batch dimension.

    At step s a rank has the keys of the rank s before it. Tensors are int64 and on the CPU, the last three with an
    entry for each rank.
    """

    group: str
    rank: int
    plan: Tensor  # a number, the same on all ranks, and one for this time that it was made
    lengths: Tensor  # of keys
    far: Tensor  # over how many ranks each block travels
    visits: Tensor  # at each step, whether a query of this rank visits one of the keys
