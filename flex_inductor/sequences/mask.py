"""What attention visits within packed sequences: tiles of queries against tiles of keys of the same sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks
from torch.utils import _pytree as pytree

from ..attention import refused
from ..masks.analysis import analysed
from ..masks.ordinary import ordinary_tensors
from ..masks.runs import FULL, Runs, merged, transposed
from ..masks.tables import Extent
from ..masks.trace import name_of
from ..masks.window import seen
from ..masks.window_schedule import BLOCK, runs_between
from ..op.schedule import BlockRuns
from ..op.tile_map import PIECE, TileMap
from ..windows import ALL, Side, Window, visited
from . import errors
from .places import Places, Tiles, block_within

FEW = 16  # queries, of which decoding kernels take all at once

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """Made by Sequences.mask, for any number of calls on these sequences."""

    schedule: BlockRuns
    tile_map: TileMap
    sequences: Any
    mask_mod: MaskMod | None
    heads: int | None  # that mask_mod tells apart


@ordinary_tensors
def sequence_mask(
    sequences: Any,
    mask_mod: MaskMod | None,
    heads: int | None,
    block_size: Any,
    window: Window = ALL,
) -> SequenceMask:
    """For what both `mask_mod` and `window` leave."""
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
    pieces = math.lcm(PIECE, keys.block) // keys.block if sequences.pages is not None else 1
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
    if mask_mod is None or both is not None or not sequences.count:
        packed = sequences.cu_k is not None
        schedule = _in_window(queries, keys, lengths, shift, both or ALL, pieces, columns=packed)
    else:
        schedule = _by_analysis(queries, keys, sequences, lengths, mask_mod, heads or 1, pieces)
    return SequenceMask(schedule, tile_map, sequences, mask_mod, heads)


def _block_size(given: Any, max_q: int, keys: Places) -> tuple[int, int]:
    if given is None:  # one of three, so that there are few kernels
        return (1 if max_q <= 1 else FEW if max_q <= FEW else BLOCK), block_within(keys, BLOCK)
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in pair):
        raise errors.bad_block_size(given)
    if block_within(keys, pair[1]) != pair[1]:
        raise errors.block_beyond_page(pair[1], keys.largest_block())
    return pair


def _in_window(
    queries: Tiles,
    keys: Tiles,
    lengths: tuple[Tensor, Tensor],
    shift: Tensor,
    window: Window,
    pieces: int,
    columns: bool,
) -> BlockRuns:
    """Rows of tiles visit one range of tiles, whose middle is full; columns are the same seen from the keys."""
    rows = _runs(queries, keys, lengths[1], shift, window, pieces)
    if not columns:
        offsets = torch.zeros(1, 1, keys.start.numel() + 1, dtype=torch.int32, device=shift.device)
        return BlockRuns(queries.block, keys.block, *(*rows, offsets))
    turned = _runs(keys, queries, lengths[0], -shift, window.turned(), counted=True)
    return BlockRuns(queries.block, keys.block, *rows, *turned)


def _runs(
    mine: Tiles,
    others: Tiles,
    length: Tensor,
    shift: Tensor,
    window: Window,
    pieces: int = 1,
    counted: bool = False,
) -> list[Tensor]:
    """Offsets and runs, first of partial tiles and then of full ones. All lines have as many; some are empty.

    From a place in its sequence to where the other side counts it is `shift`; `counted` where positions are mine.
    """
    last, moved, first_tile = mine.of(length, shift, others.first)
    origin = -moved if counted else 0
    seeing = Side(mine.block, mine.start + moved, mine.tokens, others.block, last, origin, pieces)
    return [tensor for ends in visited(window, seeing) for tensor in runs_between(ends, first_tile)]


def _by_analysis(
    queries: Tiles,
    keys: Tiles,
    sequences: Any,
    lengths: tuple[Tensor, Tensor],
    mask_mod: MaskMod,
    heads: int,
    pieces: int = 1,
) -> BlockRuns:
    """Any mask: as the grid of each sequence, in `pieces` of so many tiles, which are then put where they lie."""
    shift = lengths[1] - lengths[0]

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Behind a sequence's end a mask is asked about its last token: no table has an entry for what is not there.
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
    if pieces > 1:  # no tile without a key is visited
        stop = torch.minimum(stop, (lengths[1][sequence] + (keys.block - 1)) // keys.block)
    placed = merged(kept_heads * lines, others, line, start + first, stop + first, runs.kind)
    tables = [
        table for side in (placed, transposed(placed, kept_heads)) for table in _tables(side, kept_heads)
    ]
    return BlockRuns(queries.block, keys.block, *tables)


def _tables(runs: Runs, heads: int) -> list[Tensor]:
    found = []
    for full in (False, True):
        chosen = runs.of_kind(FULL if full else FULL - 1)
        lines = runs.lines // heads
        starts = torch.arange(heads, device=runs.line.device)[:, None] * lines
        offsets = chosen.offsets()[starts + torch.arange(lines + 1, device=runs.line.device)]
        found += [offsets[None], torch.stack([chosen.start, chosen.stop], 1).to(torch.int32)]
    return found


def _flatten(mask: SequenceMask) -> tuple[list[Any], tuple[Any, ...]]:
    tensors = [*mask.schedule[2:], *mask.tile_map, mask.sequences]
    return tensors, (mask.schedule[:2], mask.mask_mod, mask.heads)


def _unflatten(parts: Any, context: tuple[Any, ...]) -> SequenceMask:
    *tensors, queries, keys, sequences = parts
    blocks, mask_mod, heads = context
    return SequenceMask(BlockRuns(*blocks, *tensors), TileMap(queries, keys), sequences, mask_mod, heads)


def _flatten_with_keys(mask: SequenceMask) -> tuple[list[Any], tuple[Any, ...]]:
    """As torch.export asks for it."""
    parts, context = _flatten(mask)
    names = (*BlockRuns._fields[2:], *TileMap._fields, "sequences")
    return [(pytree.GetAttrKey(n), part) for n, part in zip(names, parts, strict=True)], context


pytree.register_pytree_node(
    SequenceMask,
    _flatten,
    _unflatten,
    serialized_type_name="flex_inductor.SequenceMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
