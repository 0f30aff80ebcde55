"""What attention visits within packed sequences: tiles of queries against tiles of keys of the same sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from ..checks import refused
from ..masks import pytrees
from ..masks.analysis.tiles import analysed
from ..masks.analysis.trace import name_of
from ..masks.analysis.window import seen
from ..masks.ordinary import ordinary_tensors
from ..masks.portable import portable
from ..masks.runs import Extent, merged, tables, transposed
from ..masks.window_schedule import BLOCK, bounds_of
from ..visits import KINDS, BlockRuns, Bounds, TileMap, kind_of
from ..visits.bounds import SequenceEntry
from ..visits.places import PIECE
from ..visits.window import ALL, Window
from . import errors
from .places import Places, Tiles, block_within, with_zeros

FEW = 16  # queries: decoding kernels take all of them at once

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """What attention visits within packed sequences: `Sequences.mask` makes it, for any number of calls on them.

    Args:
        schedule: which tiles visit which.
        tile_map: where the tiles lie.
        sequences: those that it was made for.
        mask_mod: the mask inside of partial tiles, or None.
        heads: the number of heads that mask_mod tells apart, or None.

    Example:
        >>> sequences = Sequences.from_lengths([100, 300])
        >>> type(sequences.mask(masks.causal()).visits).__name__  # the numbers of a window
        'Bounds'
        >>> type(sequences.mask(masks.dilated_window(4, 3)).visits).__name__  # tables of tiles
        'BlockRuns'
    """

    schedule: Bounds | BlockRuns
    tile_map: TileMap
    sequences: Any
    mask_mod: MaskMod | None
    heads: int | None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask_mod": portable(self.mask_mod, self.sequences.cu_q)}

    @property
    def visits(self) -> Bounds | BlockRuns:
        """What the ops are told to visit."""
        schedule = self.schedule
        return schedule if isinstance(schedule, BlockRuns) else schedule.constant_where_zero()


@ordinary_tensors
def sequence_mask(
    sequences: Any,
    mask_mod: MaskMod | None,
    heads: int | None,
    block_size: Any,
    window: Window = ALL,
) -> SequenceMask:
    """The mask of what both `mask_mod` and `window` let through."""
    if mask_mod is not None and torch.compiler.is_dynamo_compiling():
        refused(errors.mask_in_graph())
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool) or heads < 1):
        raise errors.bad_heads(heads)
    places = sequences.places
    blocks = _block_size(block_size, sequences.max_q, places[1])
    queries = places[0].tiles(blocks[0])
    keys = queries if places[0] is places[1] and blocks[0] == blocks[1] else places[1].tiles(blocks[1])
    lengths = (places[0].lengths, places[1].lengths)
    shift = lengths[1] - lengths[0]  # from a query's place in its sequence to its position
    tile_map = TileMap(queries.lines(places[0], queries.of(shift)[0]), keys.lines(places[1], 0))
    scattered = sequences.pages is not None
    both: Window | None = window
    if mask_mod is not None:
        found = seen(mask_mod, sequences.cu_q)
        if not found.reads_heads:
            heads = None
        elif heads is None:
            raise errors.reads_heads(name_of(mask_mod))
        both = None if found.window is None else window.within(found.window)
    if window != ALL:
        mask_mod = window.mask_mod() if mask_mod is None else and_masks(window.mask_mod(), mask_mod)
    schedule: Bounds | BlockRuns
    if mask_mod is None or both is not None or not sequences.count:
        schedule = _in_window(queries, keys, lengths, both or ALL, scattered)
    else:
        pieces = math.lcm(PIECE, keys.block) // keys.block if scattered else 1
        schedule = _by_analysis(queries, keys, sequences, lengths, mask_mod, heads or 1, pieces)
    return SequenceMask(schedule, tile_map, sequences, mask_mod, heads)


def _block_size(given: Any, max_q: int, keys: Places) -> tuple[int, int]:
    if given is None:  # one of three sizes, so that there are few kernels
        return (1 if max_q <= 1 else FEW if max_q <= FEW else BLOCK), block_within(keys, BLOCK)
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in pair):
        raise errors.bad_block_size(given)
    if block_within(keys, pair[1]) != pair[1]:
        raise errors.block_beyond_page(pair[1], keys.largest_block())
    return pair


def _in_window(
    queries: Tiles, keys: Tiles, lengths: tuple[Tensor, Tensor], window: Window, scattered: bool
) -> Bounds:
    """Kernels find from the window's numbers what a tile visits."""
    bounds = bounds_of(window, (queries.block, keys.block), None)
    of_sequences = SequenceEntry(keys.first, lengths[1], queries.first, lengths[0])
    # Unused lines of the map count as the first sequence's, even if there is none.
    table = with_zeros(of_sequences).to(torch.int32)
    return bounds._replace(sequence_table=table, scattered=scattered)


def _by_analysis(
    queries: Tiles,
    keys: Tiles,
    sequences: Any,
    lengths: tuple[Tensor, Tensor],
    mask_mod: MaskMod,
    heads: int,
    pieces: int = 1,
) -> BlockRuns:
    """Any mask: the grid of each sequence, in `pieces` of that many tiles, moved to where they lie."""
    shift = lengths[1] - lengths[0]

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Past a sequence's end the mask gets its last token: no table has an entry beyond it.
        last_q, last_kv = (
            torch.minimum(x, length[b] - 1) for x, length in zip((q, kv), lengths, strict=True)
        )
        there = (q < lengths[0][b]) & (kv < lengths[1][b])
        return there & mask_mod(b, h, last_q + shift[b], last_kv)

    within.__name__ = name_of(mask_mod)  # for errors

    blocks = (queries.block, keys.block * pieces)
    extent = Extent(sequences.count, heads, (sequences.max_q, sequences.max_k), blocks)
    runs, (_, kept_heads) = analysed(within, extent, sequences.device, "")
    rows, _ = extent.tiles
    lines, others = queries.start.numel(), keys.start.numel()
    row, head, sequence = runs.line % rows, runs.line // rows % kept_heads, runs.line // (rows * kept_heads)
    line = head * lines + queries.first[sequence] + row
    first = keys.first[sequence]
    start, stop = runs.start * pieces, runs.stop * pieces
    if pieces > 1:  # tiles without keys are not visited
        stop = torch.minimum(stop, (lengths[1][sequence] + (keys.block - 1)) // keys.block)
    placed = merged(kept_heads * lines, others, line, start + first, stop + first, runs.kind)
    both = (placed, transposed(placed, kept_heads))
    found = [table for side in both for table in tables(side, (1, kept_heads))]
    return BlockRuns.of((queries.block, keys.block), found)


def _flatten(mask: SequenceMask) -> tuple[dict[str, Any], tuple[Any, ...]]:
    fields = mask.schedule._asdict()
    tensors = {name: field for name, field in fields.items() if isinstance(field, Tensor)}
    numbers = tuple((name, field) for name, field in fields.items() if name not in tensors)
    parts = {**tensors, **mask.tile_map._asdict(), "sequences": mask.sequences}
    context = (kind_of(mask.schedule), tuple(tensors), numbers, mask.mask_mod, mask.heads)
    return parts, context


def _unflatten(parts: Any, context: tuple[Any, ...]) -> SequenceMask:
    *tensors, queries, keys, sequences = parts
    form, names, numbers, mask_mod, heads = context
    schedule = KINDS[form](**dict(zip(names, tensors, strict=True)), **dict(numbers))
    return SequenceMask(schedule, TileMap(queries, keys), sequences, mask_mod, heads)


pytrees.register(SequenceMask, _flatten, _unflatten)
