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
from ..masks.trace import name_of, trace_mask
from ..op.schedule import BlockRuns
from ..op.tile_map import PIECE, TileMap
from . import errors
from .closed_form import Window, window_of
from .places import Places, Tiles, block_within

BLOCK = 128
ALL = Window()
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
    seen: Window | None = window
    if mask_mod is not None:
        program = trace_mask(mask_mod, sequences.device)
        if "h" not in program.reads:
            heads = None
        elif heads is None:
            raise errors.reads_heads(name_of(mask_mod))
        found = window_of(program)
        seen = None if found is None else window & found
    if window != ALL:
        mask_mod = window.mask_mod() if mask_mod is None else and_masks(window.mask_mod(), mask_mod)
    if mask_mod is None or seen is not None or not sequences.count:
        packed = sequences.cu_k is not None
        schedule = _in_window(queries, keys, lengths, shift, seen or ALL, pieces, columns=packed)
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
    turned = Window(left=window.right, right=window.left)
    return BlockRuns(queries.block, keys.block, *rows, *_runs(keys, queries, lengths[0], -shift, turned))


def _runs(
    mine: Tiles, others: Tiles, length: Tensor, shift: Tensor, window: Window, pieces: int = 1
) -> list[Tensor]:
    """Offsets and runs, first of partial tiles and then of full ones. All lines have as many; some are empty.

    A tile is full if its tokens all see all of the other's, and both have as many as a tile can. Full runs have whole
    `pieces` of so many tiles.
    """
    there, moved, first_tile = mine.of(length, shift, others.first)
    block, whole, least = others.block, others.block * pieces, mine.start + moved
    most = least + mine.tokens - 1
    stop = (_to(most, window.right, there) + (block - 1)) // block
    full_stop = torch.where(mine.tokens == mine.block, _to(least, window.right, there) // whole * pieces, 0)
    if window.left == math.inf:
        start = full_start = torch.zeros_like(stop)
        stop = torch.where(mine.tokens > 0, stop, 0)
        partial = [full_stop, stop]
    else:
        start = _from(least, window.left) // block
        stop = torch.where(mine.tokens > 0, stop, 0).maximum(start)
        full_start = (_from(most, window.left) + (whole - 1)) // whole * pieces
        full_start = torch.minimum(full_start.maximum(start), stop)
        full_stop = full_stop.maximum(full_start)
        partial = [start, full_start, full_stop, stop]
    return [*_each(partial, first_tile), *_each([full_start, full_stop], first_tile)]


def _from(position: Tensor, left: float) -> Tensor:
    return (position - int(left)).clamp(min=0)


def _to(position: Tensor, right: float, end: Tensor) -> Tensor:
    """The end left out."""
    return end if right == math.inf else torch.minimum((position + (int(right) + 1)).clamp(min=0), end)


def _each(ends: list[Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets [1, 1, lines + 1] and runs, of which each line has those between two `ends`, counted from `first`."""
    lines, each = first.numel(), len(ends) // 2
    runs = (torch.stack(ends, 1) + first[:, None]).to(torch.int32).view(lines * each, 2)
    offsets = torch.arange(0, (lines + 1) * each, each, dtype=torch.int32, device=first.device)
    return offsets[None, None], runs


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
