"""Masks of tokens on a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MaskArgumentError
from ..ordinary import ordinary_tensors
from .algebra import MaskMod

Sizes = int | Sequence[int]


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
    count = math.prod(sizes)
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
