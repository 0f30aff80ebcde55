"""Which tiles of a sequence read which, under one or more masks, and the work of ranks under a layout.

A row tile has `tile` queries, a column tile as many keys. Work is counted in tiles of scores, traffic in tiles of keys
and values. Memory and time grow with the runs of the masks, not with rows times columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from ..masks.library import document
from ..masks.library.blockmask import create_block_mask
from ..masks.ordinary import ordinary_tensors
from ..masks.planned import PlannedMask
from ..masks.runs import preceding
from ..masks.schedule import RunSchedule
from ..sequences import SequenceMask, Sequences
from . import errors

TILE = 128


def on_host(function: Callable) -> Callable:
    """Have `function` make tensors on the CPU, whatever torch.set_default_device says."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True, eq=False)
class Reads:
    """The reads of one mask: in some batch and head row `line[i]` reads columns `start[i]` to `stop[i]`. Runs are
    disjoint."""

    weight: float  # of the mask, such as the number of layers that use it
    cost: Tensor  # float64 [tiles], the tiles of scores of each row, the mean over batches and heads
    line: Tensor
    start: Tensor
    stop: Tensor


@dataclass(frozen=True, eq=False)
class Loads:
    """What each rank computes, reads, gets and sends of each mask: float64 [masks, ranks], in tiles."""

    weights: Tensor
    work: Tensor
    read: Tensor  # of its own and of others
    received: Tensor
    sent: Tensor

    def imbalance(self) -> float:
        """The most work of a rank over the mean."""
        work = self.weights @ self.work
        return float(work.max() / work.mean()) if work.any() else 1.0


@dataclass(frozen=True, eq=False)
class TileWork:
    length: int
    tile: int
    masks: tuple[Reads, ...]

    @staticmethod
    @on_host
    @ordinary_tensors
    def of(
        masks: Any,
        length: int | None = None,
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        tile: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
    ) -> TileWork:
        """Of one mask or of a mapping of them, with their `weights`, 1 by default.

        A mask is a BlockMask, a RunSchedule, Sequences, what `Sequences.mask` makes, a mask_mod or None for no mask.
        The last two need the `length`, and a mask_mod that reads b or h `batch` or `heads`. `tile` must be a multiple
        of all block sizes; the least one by default.
        """
        named = dict(masks) if isinstance(masks, Mapping) else {"mask": masks}
        if not named:
            raise errors.no_masks()
        given = _weights(weights, named)
        found = {
            name: schedule_of(name, mask, length, batch, heads, tile or TILE, _device(mask))
            for name, mask in named.items()
        }
        expected = length if length is not None else next(iter(found.values())).seq_lengths[0]
        for name, mask in found.items():
            if mask.seq_lengths != (expected, expected):
                raise errors.other_length(name, *mask.seq_lengths, expected)
        least = math.lcm(*(size for mask in found.values() for size in mask.BLOCK_SIZE))
        size = least if tile is None else tile
        if size < 1 or size % least:
            raise errors.bad_tile(size, least)
        return TileWork(
            expected, size, tuple(_reads(mask, size, given[name]) for name, mask in found.items())
        )

    @property
    def tiles(self) -> int:
        return -(-self.length // self.tile)

    @functools.cached_property
    def cost(self) -> Tensor:
        """The work of each row over all masks, each times its weight; float64 [tiles]."""
        return torch.stack([mask.cost * mask.weight for mask in self.masks]).sum(0)

    @functools.cached_property
    def hull(self) -> tuple[Tensor, Tensor]:
        """The first column that each row reads under any mask, and the end of the last; its own place if it reads
        none."""
        own = torch.arange(self.tiles)
        first, stop = torch.full_like(own, self.tiles), torch.zeros_like(own)
        for mask in self.masks:
            first.scatter_reduce_(0, mask.line, mask.start, "amin")
            stop.scatter_reduce_(0, mask.line, mask.stop, "amax")
        none = first >= stop
        return torch.where(none, own, first), torch.where(none, own, stop)

    @on_host
    def loads(self, owner: Sequence[int] | Tensor, ranks: int) -> Loads:
        """The loads of the ranks, if rank `owner[t]` holds tile t."""
        holder = torch.as_tensor(owner, dtype=torch.int64)
        parts = [_loads(mask, holder, ranks) for mask in self.masks]
        weights = torch.tensor([mask.weight for mask in self.masks], dtype=torch.float64)
        return Loads(weights, *(torch.stack(x).to(torch.float64) for x in zip(*parts, strict=True)))

    @on_host
    def between(self, owner: Sequence[int] | Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """[masks, ranks, ranks]: work of the row's rank with the column's keys, and whether it reads any.

        A row's work is spread evenly over the columns it reads: where heads differ, that is not exact.
        """
        holder = torch.as_tensor(owner, dtype=torch.int64)
        both = [_between(mask, holder, ranks) for mask in self.masks]
        work, reads = (torch.stack(x) for x in zip(*both, strict=True))
        return work, reads


def _weights(given: Any, named: dict[str, Any]) -> dict[str, float]:
    if given is None:
        return dict.fromkeys(named, 1.0)
    found = dict(given) if isinstance(given, Mapping) else dict(zip(named, given, strict=False))
    count = len(given)
    if count != len(named) or set(found) != set(named):
        raise errors.other_weights(given, list(named))
    for name, weight in found.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise errors.bad_weight(name, weight)
    return {name: float(weight) for name, weight in found.items()}


def _device(mask: Any) -> str | None:
    """The device on which the planner makes masks from functions. Other masks stay where they are."""
    return "cpu" if mask is None or callable(mask) else None


def schedule_of(
    name: str, mask: Any, length: int | None, batch: int | None, heads: int | None, block: int, device: Any
) -> RunSchedule:
    """A mask in any form as a RunSchedule, on `device`; by default that of the masks."""
    if isinstance(mask, BlockMask):
        mask = RunSchedule.from_block_mask(mask)
    if isinstance(mask, RunSchedule):
        return mask if device is None else mask.to(device)
    if isinstance(mask, PlannedMask):
        raise errors.planned_twice(name)
    if isinstance(mask, Sequences | SequenceMask):
        mask, heads, length, own = _packed(name, mask)
        batch, device = None, own if device is None else device
    elif mask is None:
        mask, batch, heads = noop_mask, None, None
    elif not callable(mask) or isinstance(mask, Mapping):
        raise errors.not_a_mask(name, mask)
    if length is None:
        raise errors.no_length(name)
    return create_block_mask(mask, batch, heads, length, length, device, block, compact=True)


def _packed(name: str, mask: Sequences | SequenceMask) -> tuple[Callable, int | None, int, torch.device]:
    """A mask of packed sequences as one of the packed tokens; its heads, length and device."""
    sequences = mask if isinstance(mask, Sequences) else mask.sequences
    same = sequences.cu_k is not None and torch.equal(sequences.cu_q, sequences.cu_k)
    if not same or sequences.used_q is not None or sequences.used_k is not None:
        raise errors.not_packed(name)
    starts = sequences.cu_q.long()
    whole = document(cu_seqlens=starts, causal=False)
    mask_mod = mask.mask_mod if isinstance(mask, SequenceMask) else None
    heads = mask.heads if isinstance(mask, SequenceMask) else None
    length = sequences.total_q
    if mask_mod is None:
        return whole, heads, length, sequences.device
    place = torch.arange(length, device=sequences.device)
    sequence = torch.repeat_interleave(starts.diff())
    place = place - starts[sequence]
    local = mask_mod

    def packed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return whole(b, h, q_idx, kv_idx) & local(sequence[q_idx], h, place[q_idx], place[kv_idx])

    return packed, heads, length, sequences.device


def _reads(mask: RunSchedule, tile: int, weight: float) -> Reads:
    runs, count = mask.row_runs(), mask.grids[0] * mask.grids[1]
    down, across = (tile // size for size in mask.BLOCK_SIZE)
    tiles = -(-mask.seq_lengths[0] // tile)
    line = (runs.line % max(1, -(-mask.seq_lengths[0] // mask.BLOCK_SIZE[0])) // down).cpu()
    start, stop = runs.start.cpu(), runs.stop.cpu()
    share = (stop - start).to(torch.float64) / (count * down * across)
    cost = torch.zeros(tiles, dtype=torch.float64).index_add_(0, line, share)
    return Reads(weight, cost, *_united(line, start // across, -(-stop // across), tiles))


def _united(line: Tensor, start: Tensor, stop: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Runs that may overlap as disjoint ones, sorted by line and start."""
    stride = columns + 1  # so that the end of a line is before the beginning of the next
    begin, order = torch.sort(line * stride + start)
    end = (line * stride + stop)[order]
    reach = end.cummax(0).values
    opens = begin > preceding(reach, -1)
    begin = begin[opens]
    # The end of the last run before the next one opens.
    last = torch.roll(opens, -1) if opens.numel() else opens
    end = reach[last]
    return begin // stride, begin % stride, end - begin // stride * stride


def _loads(mask: Reads, holder: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = holder.numel()
    work = torch.zeros(ranks, dtype=torch.float64).index_add_(0, holder, mask.cost)
    reader, start, stop = _united(holder[mask.line], mask.start, mask.stop, tiles)
    read = torch.zeros(ranks, dtype=torch.int64).index_add_(0, reader, stop - start)
    own = torch.sort(holder * (tiles + 1) + torch.arange(tiles)).values
    low, high = (torch.searchsorted(own, reader * (tiles + 1) + end) for end in (start, stop))
    kept = torch.zeros(ranks, dtype=torch.int64).index_add_(0, reader, high - low)
    change = torch.bincount(start, minlength=tiles + 1) - torch.bincount(stop, minlength=tiles + 1)
    readers = change.cumsum(0)[:-1]
    sent = torch.zeros(ranks, dtype=torch.int64).index_add_(0, holder, readers)
    return work, read, read - kept, sent - kept


def _between(mask: Reads, holder: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """By pieces: neighbouring columns of one holder. A few readers at a time keep memory at ranks times ranks."""
    tiles = holder.numel()
    work, reads = (torch.zeros(ranks, ranks, dtype=torch.float32) for _ in range(2))
    opens = torch.ones(tiles, dtype=torch.bool)
    opens[1:] = holder[1:] != holder[:-1]
    piece = opens.cumsum(0) - 1
    begin = opens.nonzero().squeeze(1)
    size = torch.bincount(piece)
    pieces = size.numel()
    spread = torch.bincount(mask.line, mask.stop - mask.start, minlength=tiles).clamp(min=1)
    share = (mask.cost / spread)[mask.line].to(torch.float32)
    first, last = piece[mask.start], piece[mask.stop - 1]
    outside = (mask.start - begin[first], begin[last] + size[last] - mask.stop)
    reader = holder[mask.line]
    at_once = max(1, (1 << 22) // (pieces + 1))
    for low in range(0, ranks, at_once):
        some = min(at_once, ranks - low)
        here = ((reader >= low) & (reader < low + some)).nonzero().squeeze(1)
        row = (reader[here] - low) * (pieces + 1)
        ends = (row + first[here], row + last[here])
        covered = [torch.zeros(some * (pieces + 1), dtype=torch.float32) for _ in range(2)]
        for result, value in zip(covered, (share[here], torch.ones_like(share[here])), strict=True):
            result.index_add_(0, ends[0], value)
            result.index_add_(0, ends[1] + 1, -value)
        done, read = (x.view(some, pieces + 1).cumsum(1) for x in covered)
        done[:, :-1] *= size
        for end, beyond in zip(ends, outside, strict=True):
            done.view(-1).index_add_(0, end, -share[here] * beyond[here])
        work[low : low + some].index_add_(1, holder[begin], done[:, :-1])
        reads[low : low + some].index_add_(1, holder[begin], (read[:, :-1] > 0.5).to(torch.float32))
    return work, reads > 0
