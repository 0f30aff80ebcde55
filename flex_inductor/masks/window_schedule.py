"""Schedules of windows: bounds, and the runs that follow from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..mod_ir.arguments import INDEX_DTYPE
from ..mod_ir.replay import Unchanging
from ..visits import Bounds, TileMap
from ..visits.window import Window
from . import pytrees
from .analysis.window import MOST
from .ordinary import ordinary_tensors
from .runs import FULL, PARTIAL, Extent, Runs, merged
from .schedule import TENSORS, RunSchedule

BLOCK = 128


def bounds_of(window: Window, block: tuple[int, int], shift: int | None) -> Bounds:
    """Kernels add to these numbers in int32, so what is as far off as MOST has no end. No position lies there."""
    left, right = (
        None if isinstance(end, float) or (isinstance(end, int) and end >= MOST) else end
        for end in (window.left, window.right)
    )
    chunk = min(window.chunk, MOST)
    return Bounds(*block, left, right, chunk, shift, window.prefix, window.documents)


class WindowSchedule(RunSchedule):
    """A RunSchedule whose runs are made on demand: kernels follow its bounds instead."""

    bounds: Bounds
    _device: torch.device

    def __init__(self, bounds: Bounds, extent: Extent, device: torch.device, mask_mod: Callable[..., Tensor]):
        give = object.__setattr__  # instances are frozen
        give(self, "bounds", bounds)
        give(self, "batch", extent.batch)
        give(self, "heads", extent.heads)
        give(self, "seq_lengths", extent.lengths)
        give(self, "BLOCK_SIZE", extent.block)
        give(self, "_device", device)
        give(self, "mask_mod", mask_mod)
        give(self, "separate_full_blocks", True)

    @property
    def device(self) -> torch.device:
        return next((n.device for n in self.bounds if isinstance(n, Tensor)), self._device)

    @property
    def visits(self) -> Bounds:
        return self.bounds.constant_where_zero()

    @ordinary_tensors
    def __getattr__(self, name: str) -> Tensor:
        if name not in TENSORS:
            raise AttributeError(name)
        runs = runs_of(self.bounds, self.seq_lengths, None, self.device)
        made = RunSchedule.from_runs(runs, self.bounds.grids, self.extent, self.mask_mod)
        for name_of_tensor, tensor in zip(TENSORS, made.tensors, strict=True):
            object.__setattr__(self, name_of_tensor, tensor)
        return getattr(made, name)

    @ordinary_tensors
    def to(self, device: torch.device | str) -> WindowSchedule:
        bounds = self.bounds.with_tensors(lambda n: n.to(device))
        return WindowSchedule(bounds, self.extent, torch.empty((), device=device).device, self.mask_mod)


def runs_of(bounds: Bounds, lengths: tuple[int, int], tile_map: TileMap | None, device: torch.device) -> Runs:
    """The runs that tile_runs would find, from the positions of tiles alone."""
    if tile_map is None:
        rows, columns = (-(-length // block) for length, block in zip(lengths, bounds[:2], strict=True))
    else:
        rows, columns = (lines.size(0) for lines in tile_map)
    ends = bounds.all_ends("keys", *lengths, tile_map, device)
    return _between(ends, (bounds.grids[0], rows), columns)


def _between(ends_of_kinds: Sequence[Sequence[Any]], shape: tuple[int, int], columns: int) -> Runs:
    """Partial and full runs, from where they begin and end in each line of `shape`."""
    found = []
    for kind, ends in zip((PARTIAL, FULL), ends_of_kinds, strict=True):
        places = [end.expand(shape).flatten().long() for end in ends]
        for start, stop in zip(places[::2], places[1::2], strict=True):
            line = (start < stop).nonzero().squeeze(-1)
            found.append((line, start[line], stop[line], torch.full_like(line, kind, dtype=torch.int8)))
    return merged(math.prod(shape), columns, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def schedule_of(window: Window, queries: int, keys: int, device: torch.device) -> WindowSchedule:
    """For a call whose last query is at the last key."""
    extent = Extent(1, 1, (queries, keys), (BLOCK, BLOCK))
    shift: Any = keys - queries
    mask_mod: Any
    if torch.compiler.is_dynamo_compiling() or not isinstance(shift, int):
        mask_mod = window.mask_mod(shift)
    elif shift:
        # As data, so that the trace and kernel of an eager call serve other lengths too.
        place = torch.full((), shift, dtype=INDEX_DTYPE, device=device)
        mask_mod = Unchanging(window.mask_mod(place), (place,), _kept(window))
    else:
        mask_mod = _unshifted(window)
    return WindowSchedule(bounds_of(window, extent.block, None), extent, device, mask_mod)


@functools.lru_cache(maxsize=1024)
def _unshifted(window: Window) -> Unchanging:
    return Unchanging(window.mask_mod(), (), {})


@functools.lru_cache(maxsize=1024)
def _kept(window: Window) -> dict[Any, Any]:
    """The traces of all its masks with a shift."""
    return {}


_IN_A_TENSOR = "in a tensor"


def _flatten(schedule: WindowSchedule) -> tuple[dict[str, Tensor], Any]:
    bounds = schedule.bounds
    numbers = {name: number for name, number in bounds._asdict().items() if isinstance(number, Tensor)}
    rest = bounds.with_tensors(lambda n: _IN_A_TENSOR)
    return numbers, (rest, schedule.extent, schedule.device, schedule.mask_mod)


def _unflatten(numbers: Any, context: Any) -> WindowSchedule:
    rest, given = context[0], iter(numbers)
    fields: Any = (next(given) if field == _IN_A_TENSOR else field for field in rest)
    return WindowSchedule(Bounds(*fields), *context[1:])


pytrees.register(WindowSchedule, _flatten, _unflatten)
