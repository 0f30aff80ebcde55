"""Masks of where a query and a key are in a sequence."""

from __future__ import annotations

from torch import Tensor

from ..errors import MaskArgumentError
from .algebra import MaskMod
from .sizes import positive


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
    positive("sliding_window", size=size)

    def sliding_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance < size) & (distance >= 0 if causal else distance > -size)

    return sliding_window


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
    positive("dilated_window", size=size, dilation=dilation)

    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < size * dilation) & (distance % dilation == 0)

    return dilated_window


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
    positive("global_local", window=window)

    def global_local(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() < window
        return near | (q_idx < global_tokens) | (kv_idx < global_tokens)

    return global_local
