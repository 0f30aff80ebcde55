"""What every schedule answers, whatever the form of its data. A new kind is a class that `KINDS` names too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from .band import Band
from .bounds import Bounds
from .places import TileMap
from .runs import BlockRuns


class Bands(Protocol):
    """A schedule that is read for one call."""

    grids: tuple[int, int]
    q_block: int
    kv_block: int

    def band(self, b: slice, h: slice, m: slice) -> Band:
        """The band of the queries `m` of these batches and heads. With a map, queries are counted tile by tile."""
        ...


class Schedule(Protocol):
    """Blocks of `q_block` queries visit blocks of `kv_block` keys: partial ones under mask_mod, full ones without it.

    Beside the two block sizes fields are tensors or numbers, so that a schedule is an argument of graphs and ops.
    """

    @property
    def q_block(self) -> int: ...

    @property
    def kv_block(self) -> int: ...

    @property
    def form(self) -> str:
        """How kernels read it: one of FORMS."""
        ...

    @property
    def grids(self) -> tuple[int, int]:
        """For how many batches and heads it has entries; 1 if all share them."""
        ...

    @property
    def lists_queries(self) -> bool:
        """Whether it also says which query blocks visit a KV block."""
        ...

    def bands(self, queries: int, keys: int, tile_map: TileMap | None, device: torch.device) -> Bands: ...

    def shares(self, queries: int, keys: int, tile_map: TileMap | None) -> tuple[float, float]:
        """The shares of all blocks that are visited under mask_mod, and without it."""
        ...

    def for_map(self, tile_map: TileMap) -> tuple[int, int] | None:
        """How many tiles of queries and of keys a map beside it has; None if it is not for maps."""
        ...

    def of_part(self, b: slice, h: slice) -> Any:
        """The same for these batches and heads of a call without a map."""
        ...

    def with_tensors(self, changed: Any) -> Any:
        """The same with what `changed` makes of each tensor."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


KINDS: dict[str, type[Any]] = {"runs": BlockRuns, "bounds": Bounds}
FORMS = ("lists", "runs", "bounds")  # in which kernels read them


def kind_of(schedule: Any) -> str:
    """The key of its class in `KINDS`: its name in graphs and texts."""
    return next(form for form, known in KINDS.items() if isinstance(schedule, known))
