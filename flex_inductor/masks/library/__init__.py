"""Masks by name. Each constructor returns a plain mask_mod, which torch's FlexAttention takes as well.

In the pictures a row is a query and a column is a key; `#` is attended to, `.` is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MaskArgumentError
from ..ordinary import ordinary_tensors
from .algebra import MaskMod

Sizes = int | Sequence[int]


def causal() -> MaskMod:
    """Every token sees itself and what came before.

    #...
    ##..
    ###.
    ####
    """

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    return causal


def sliding_window(size: int, *, causal: bool = True) -> MaskMod:
    """The last `size` tokens, itself included; not causal: less than `size` away on either side.

    #.....      ##....
    ##....      ###...
    .##...      .###..
    ..##..      ..###.
    """
    _positive("sliding_window", size=size)

    def sliding_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance < size) & (distance >= 0 if causal else distance > -size)

    return sliding_window


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """All see the first `prefix` tokens, the rest is causal; a tensor holds one prefix for each batch.

    ##..
    ##..
    ###.
    ####
    """
    if isinstance(prefix, Tensor) and prefix.dim() != 1:
        raise MaskArgumentError(
            f"prefix_lm: prefix: expected an integer or a [batch] tensor, got shape {tuple(prefix.shape)}."
        )

    def prefix_lm(b, h, q_idx, kv_idx):
        end = prefix[b] if isinstance(prefix, Tensor) else prefix
        return (kv_idx < end) | (q_idx >= kv_idx)

    return prefix_lm


@ordinary_tensors
def document(
    ids: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
) -> MaskMod:
    """Several documents in one sequence; tokens see their own only.

    Give one of the three: `ids` is [length] or [batch, length], in any order; the other two describe
    consecutive documents.

    ##....
    ##....
    ..#...
    ...###
    """
    given = [x is not None for x in (ids, lengths, cu_seqlens)]
    if sum(given) != 1:
        raise MaskArgumentError(
            f"document: expected exactly one of ids, lengths and cu_seqlens, got {sum(given)} of them."
        )
    if ids is None:
        if cu_seqlens is not None:
            counts = torch.diff(cu_seqlens)
        else:
            counts = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
        if counts.dim() != 1 or bool((counts < 0).any()):
            raise MaskArgumentError(
                "document: lengths: expected a 1-d list of lengths (cu_seqlens: ascending ends from 0 on), "
                f"got {counts.tolist()}."
            )
        ids = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    if ids.dim() not in (1, 2):
        raise MaskArgumentError(
            f"document: ids: expected [length] or [batch, length], got shape {tuple(ids.shape)}."
        )

    def document(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx] if ids.dim() == 1 else ids[b, q_idx] == ids[b, kv_idx]
        return same & (q_idx >= kv_idx) if causal else same

    return document


def dilated_window(size: int, dilation: int) -> MaskMod:
    """`size` tokens back in steps of `dilation`, itself included.

    #.....
    .#....
    #.#...
    .#.#..
    ..#.#.
    """
    _positive("dilated_window", size=size, dilation=dilation)

    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < size * dilation) & (distance % dilation == 0)

    return dilated_window


def global_local(window: int, global_tokens: int) -> MaskMod:
    """A band, and the first `global_tokens` tokens that see all and are seen by all.

    ######
    ###...
    ####..
    #.###.
    #..###
    """
    _positive("global_local", window=window)

    def global_local(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() < window
        return near | (q_idx < global_tokens) | (kv_idx < global_tokens)

    return global_local


def block_diffusion(length: int, block: int) -> MaskMod:
    """Training of block diffusion: `length` noised tokens, then the same `length` tokens clean.

    A noised block sees itself and the clean blocks before it; a clean block sees clean blocks up to itself.

    ##.. ....
    ##.. ....
    ..## ##..
    ..## ##..
    .... ##..
    .... ##..
    .... ####
    .... ####
    """
    _positive("block_diffusion", length=length, block=block)

    def block_diffusion(b, h, q_idx, kv_idx):
        q_block, kv_block = q_idx % length // block, kv_idx % length // block
        q_noised, kv_noised = q_idx < length, kv_idx < length
        own = q_noised & kv_noised & (q_block == kv_block)
        past = ~kv_noised & torch.where(q_noised, kv_block < q_block, kv_block <= q_block)
        return own | past

    return block_diffusion


def neighborhood(shape: Sizes, window: Sizes, tile: Sizes | None = None) -> MaskMod:
    """On a 1-d, 2-d or 3-d grid of tokens, the `window` nearest along every axis, fewer at no border.

    With `tile` the tokens are ordered tile by tile, each tile row by row, so that a block of attention is a
    compact patch of the grid: `neighborhood_order` gives that order.

    1-d, window 3:        what one token of a 4 x 5 grid sees, window 3:
    ###...                .....
    ###...                .###.
    .###..                .###.
    ..###.                .###.
    """
    sizes, widths, tiles = _grid("neighborhood", shape, window, tile)

    def neighborhood(b, h, q_idx, kv_idx):
        q_place, kv_place = (_coordinates(index, sizes, tiles) for index in (q_idx, kv_idx))
        inside = None
        for q, kv, size, width in zip(q_place, kv_place, sizes, widths, strict=True):
            center = q.clamp(width // 2, size - 1 - (width - 1) // 2)
            near = (kv - center >= -(width // 2)) & (kv - center <= (width - 1) // 2)
            inside = near if inside is None else inside & near
        return inside

    return neighborhood


@ordinary_tensors
def neighborhood_order(shape: Sizes, tile: Sizes) -> Tensor:
    """For each position of the tiled order, the row-major index of its token: `x[:, :, order]` reorders."""
    sizes, _, tiles = _grid("neighborhood_order", shape, 1, tile)
    count = 1
    for size in sizes:
        count *= size
    order = torch.zeros(count, dtype=torch.int64)
    for coordinate, size in zip(_coordinates(torch.arange(count), sizes, tiles), sizes, strict=True):
        order = order * size + coordinate
    return order


def _coordinates(index: Tensor, shape: tuple[int, ...], tile: tuple[int, ...] | None) -> list[Tensor]:
    if tile is None:
        return _unravel(index, shape)
    volume = 1
    for size in tile:
        volume *= size
    tiles = _unravel(index // volume, tuple(s // t for s, t in zip(shape, tile, strict=True)))
    return [a * t + x for a, t, x in zip(tiles, tile, _unravel(index % volume, tile), strict=True)]


def _unravel(index: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    found = []
    for size in reversed(shape[1:]):
        found.append(index % size)
        index = index // size
    return [index, *reversed(found)]


def _grid(name: str, shape: Sizes, window: Sizes, tile: Sizes | None) -> tuple:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    window = (window,) * len(shape) if isinstance(window, int) else tuple(window)
    if tile is not None:
        tile = (tile,) * len(shape) if isinstance(tile, int) else tuple(tile)
    if not 1 <= len(shape) <= 3 or len(window) != len(shape) or (tile and len(tile) != len(shape)):
        raise MaskArgumentError(
            f"{name}: expected one to three axes, the same for shape, window and tile, "
            f"got shape {shape}, window {window}, tile {tile}."
        )
    for axis, (size, width) in enumerate(zip(shape, window, strict=True)):
        if not 1 <= width <= size:
            raise MaskArgumentError(
                f"{name}: window: expected 1 to {size} along axis {axis}, the size of the grid, got {width}."
            )
        if tile and (tile[axis] < 1 or size % tile[axis]):
            raise MaskArgumentError(
                f"{name}: tile: expected a divisor of {size} along axis {axis}, got {tile[axis]}. "
                "Pad the grid."
            )
    return shape, window, tile


def shared_prefix(prefix: int, suffix: int) -> MaskMod:
    """One prompt of `prefix` tokens, then several answers of `suffix` tokens that do not see each other.

    #.....
    ##....
    ###...
    ####..
    ##..#.
    ##..##
    """
    _positive("shared_prefix", suffix=suffix)

    def shared_prefix(b, h, q_idx, kv_idx):
        same_answer = (q_idx - prefix) // suffix == (kv_idx - prefix) // suffix
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | same_answer)

    return shared_prefix


@ordinary_tensors
def tree(parents: Sequence[int] | Tensor, context: int | Tensor = 0) -> MaskMod:
    """Speculative decoding: a node sees the `context` keys before the tree, its ancestors and itself.

    `parents[i]` is the parent of node i, -1 for a root, and comes before it. Query i is node i; key
    `context + i` is node i. A tensor `context` holds one length for each batch.

    parents (-1, 0, 0, 1), context 2:
    ###...
    ####..
    ###.#.
    ####.#
    """
    if isinstance(context, Tensor) and context.dim() != 1:
        raise MaskArgumentError(
            f"tree: context: expected an integer or a [batch] tensor, got shape {tuple(context.shape)}."
        )
    listed = parents.tolist() if isinstance(parents, Tensor) else list(parents)
    device = parents.device if isinstance(parents, Tensor) else None
    if not listed:
        raise MaskArgumentError("tree: parents: expected at least one node, got none.")
    nodes = len(listed)
    sees = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(listed):
        if not -1 <= parent < node:
            raise MaskArgumentError(
                f"tree: parents: expected node {node}'s parent to come before it "
                f"(or -1 for a root), got {parent}."
            )
        if parent >= 0:
            sees[node] |= sees[parent]
    sees = sees.to(device)

    def tree(b, h, q_idx, kv_idx):
        start = context[b] if isinstance(context, Tensor) else context
        node = kv_idx - start
        within = (node >= 0) & (node < nodes) & (q_idx < nodes)
        return (node < 0) | (within & sees[q_idx.clamp(0, nodes - 1), node.clamp(0, nodes - 1)])

    return tree


def ragged(q_lengths: Tensor, kv_lengths: Tensor | None = None) -> MaskMod:
    """Padded batches: sequence b has `q_lengths[b]` queries and `kv_lengths[b]` keys, the same by default.

    b = 0, 3 tokens:    b = 1, 2 tokens:
    ###.                ##..
    ###.                ##..
    ###.                ....
    ....                ....
    """
    kv_lengths = q_lengths if kv_lengths is None else kv_lengths
    for name, lengths in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)):
        if not isinstance(lengths, Tensor) or lengths.dim() != 1:
            raise MaskArgumentError(f"ragged: {name}: expected a [batch] tensor, got {lengths!r}.")

    def ragged(b, h, q_idx, kv_idx):
        return (q_idx < q_lengths[b]) & (kv_idx < kv_lengths[b])

    return ragged


def _positive(function: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise MaskArgumentError(f"{function}: {name}: expected an integer of at least 1, got {size!r}.")
