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
    """Let every token see itself and what came before.

    In the picture a row is a query, a column is a key, and `#` is attended to::

        #...
        ##..
        ###.
        ####

    Returns:
        mask_mod: with bool results, like all functions of this page.

    Example:
        >>> schedule = create_block_mask(masks.causal(), None, None, 65536, 65536, compact=True)
        >>> round(schedule.sparsity(), 1)  # percent of the tiles that nobody visits
        49.9
    """

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    return causal


def sliding_window(size: int, *, causal: bool = True) -> MaskMod:
    """Let a token see the last `size` tokens, itself included.

    Causal, and not causal, both of size 2::

        #.....      ##....
        ##....      ###...
        .##...      .###..
        ..##..      ..###.

    Args:
        size: how many tokens.
        causal: False sees tokens less than `size` away on either side.

    Raises:
        MaskArgumentError: `size` is no positive integer.

    Example:
        >>> window = masks.sliding_window(1024)
        >>> schedule = create_block_mask(window, None, None, 65536, 65536, compact=True)
        >>> round(schedule.sparsity(), 1)
        98.3
    """
    _positive("sliding_window", size=size)

    def sliding_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance < size) & (distance >= 0 if causal else distance > -size)

    return sliding_window


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Let all see the first `prefix` tokens; the rest is causal.

    Prefix 2::

        ##..
        ##..
        ###.
        ####

    Args:
        prefix: how many tokens, or an integer tensor [batch] with a number for each batch.

    Raises:
        MaskArgumentError: a tensor `prefix` does not have one dimension.

    Example:
        >>> prefixes = torch.tensor([1, 3])
        >>> mask_mod = masks.prefix_lm(prefixes)
        >>> query, keys = 0, torch.arange(4)
        >>> [mask_mod(b, 0, query, keys).int().tolist() for b in (0, 1)]
        [[1, 0, 0, 0], [1, 1, 1, 0]]
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
    """Let tokens see their own document only, where several are in one sequence.

    Give one of the first three. Lengths 2, 1 and 3, not causal::

        ##....
        ##....
        ..#...
        ...###

    Args:
        ids: integer tensor [length] or [batch, length], the document of each token, in any order.
        lengths: of consecutive documents, as a list or an integer tensor.
        cu_seqlens: where consecutive documents begin and the last one ends, as an integer tensor.
        causal: False sees later tokens of the document too.

    Raises:
        MaskArgumentError: not exactly one of the three is given, or it has another shape or negative lengths.

    Example:
        >>> mask_mod = masks.document(lengths=[2, 1, 3])
        >>> index = torch.arange(6)
        >>> mask_mod(0, 0, index[:, None], index).int()
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [0, 0, 1, 0, 0, 0],
                [0, 0, 0, 1, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
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
    """Let a token see `size` tokens back in steps of `dilation`, itself included.

    Size 2, dilation 2::

        #.....
        .#....
        #.#...
        .#.#..
        ..#.#.

    Args:
        size: how many tokens.
        dilation: the distance between two of them.

    Raises:
        MaskArgumentError: one of both is no positive integer.

    Example:
        >>> seen = masks.dilated_window(4, 3)(0, 0, 20, torch.arange(24))
        >>> seen.nonzero().flatten().tolist()  # the keys of query 20
        [11, 14, 17, 20]
    """
    _positive("dilated_window", size=size, dilation=dilation)

    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < size * dilation) & (distance % dilation == 0)

    return dilated_window


def global_local(window: int, global_tokens: int) -> MaskMod:
    """Let tokens see their neighbours, and a few first tokens see all and be seen by all.

    Window 2, one global token::

        ######
        ###...
        ####..
        #.###.
        #..###

    Args:
        window: neighbours are less than this far away.
        global_tokens: how many first tokens are global.

    Raises:
        MaskArgumentError: `window` is no positive integer.

    Example:
        >>> mask_mod = masks.global_local(window=256, global_tokens=64)
        >>> schedule = create_block_mask(mask_mod, None, None, 8192, 8192, compact=True)
        >>> round(schedule.sparsity(), 1)
        89.4
    """
    _positive("global_local", window=window)

    def global_local(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() < window
        return near | (q_idx < global_tokens) | (kv_idx < global_tokens)

    return global_local


def block_diffusion(length: int, block: int) -> MaskMod:
    """Train block diffusion: `length` noised tokens, then the same `length` tokens clean.

    A noised block sees itself and the clean blocks before it; a clean block sees clean blocks up to itself. Length 4,
    blocks of 2::

        ##.. ....
        ##.. ....
        ..## ##..
        ..## ##..
        .... ##..
        .... ##..
        .... ####
        .... ####

    Args:
        length: of the text; queries and keys have twice as many.
        block: tokens of a block.

    Raises:
        MaskArgumentError: one of both is no positive integer.

    Example:
        >>> mask_mod = masks.block_diffusion(length=2048, block=256)
        >>> create_block_mask(mask_mod, None, None, 4096, 4096, compact=True).sparsity()
        71.875
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
    """Let a token of a 1-d, 2-d or 3-d grid see the `window` nearest along every axis, as many at a border.

    1-d, and what one token of a 4 x 5 grid sees, both with window 3::

        ###...                .....
        ###...                .###.
        .###..                .###.
        ..###.                .###.

    Args:
        shape: the sizes of the grid, up to three.
        window: how many tokens along each axis; a number stands for all axes.
        tile: order tokens tile by tile, each tile row by row. A block of attention is then a compact patch of the grid.
            `neighborhood_order` gives that order.

    Raises:
        MaskArgumentError: the numbers of axes differ, a window is larger than the grid, or a tile does not divide it.

    Example:
        >>> def sparsity(**tile):
        ...     mask_mod = masks.neighborhood((64, 64), (7, 7), **tile)
        ...     schedule = create_block_mask(mask_mod, None, None, 4096, 4096, compact=True)
        ...     return schedule.sparsity()
        >>> sparsity(), sparsity(tile=(8, 16))  # tiles are worth a new order
        (84.765625, 78.515625)
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
    """Give the row-major index of the token at each position of the tiled order.

    Args:
        shape: the sizes of the grid, up to three.
        tile: the sizes of a tile, which divide those of the grid.

    Returns:
        Tensor: int64 [tokens]. `x[:, :, order]` reorders tokens, and `order.argsort()` takes them back.

    Raises:
        MaskArgumentError: the numbers of axes differ, or a tile does not divide the grid.

    Example:
        >>> masks.neighborhood_order((2, 4), (2, 2))
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
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
    """Put several answers behind one prompt. They do not see each other.

    Prefix 2, suffix 2::

        #.....
        ##....
        ###...
        ####..
        ##..#.
        ##..##

    Args:
        prefix: tokens of the prompt.
        suffix: tokens of each answer.

    Raises:
        MaskArgumentError: `suffix` is no positive integer.

    Example:
        >>> mask_mod = masks.shared_prefix(prefix=2, suffix=2)
        >>> mask_mod(0, 0, 5, torch.arange(6)).int().tolist()  # does not see the first answer
        [1, 1, 0, 0, 1, 1]
    """
    _positive("shared_prefix", suffix=suffix)

    def shared_prefix(b, h, q_idx, kv_idx):
        same_answer = (q_idx - prefix) // suffix == (kv_idx - prefix) // suffix
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | same_answer)

    return shared_prefix


@ordinary_tensors
def tree(parents: Sequence[int] | Tensor, context: int | Tensor = 0) -> MaskMod:
    """Let a node of a speculation tree see the keys before the tree, its ancestors and itself.

    Query i is node i; key `context + i` is node i. Parents (-1, 0, 0, 1), context 2::

        ###...
        ####..
        ###.#.
        ####.#

    Args:
        parents: of each node, -1 for a root. A parent comes before its children.
        context: how many keys come before the tree, or an integer tensor [batch] with a number for each batch.

    Raises:
        MaskArgumentError: there are no nodes, a parent does not come before its child, or a tensor `context` does not
            have one dimension.

    Example:
        >>> mask_mod = masks.tree([-1, 0, 0, 1], context=100)
        >>> seen = mask_mod(0, 0, torch.arange(4)[:, None], torch.arange(104))
        >>> seen.sum(1).tolist()  # how many keys each node sees
        [101, 102, 102, 103]
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
    """Leave the padding of a batch out.

    Lengths 3 and 2::

        ###.                ##..
        ###.                ##..
        ###.                ....
        ....                ....

    Args:
        q_lengths: integer tensor [batch], the queries of each sequence.
        kv_lengths: the same of keys; `q_lengths` by default.

    Raises:
        MaskArgumentError: one of both is no tensor of one dimension.

    Example:
        >>> mask_mod = masks.ragged(torch.tensor([300, 40]))
        >>> schedule = create_block_mask(mask_mod, 2, None, 512, 512, compact=True)
        >>> schedule[0].sparsity(), schedule[1].sparsity()
        (43.75, 93.75)
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
