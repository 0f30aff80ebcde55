"""Score mods by name. Each constructor returns a plain score_mod, which torch's FlexAttention takes as well.

Tables are captured tensors: they get gradients if they require them. In the pictures a row is a query, a
column is a key, and the digits are what is added to (or taken from) the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import FlexValueError

__all__ = [
    "alibi",
    "alibi_slopes",
    "relative_bias",
    "relative_bias_2d",
    "sandwich",
    "soft_distance",
    "softcap",
    "t5_bias",
]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_slopes(heads: int) -> Tensor:
    """Give the slopes of ALiBi: 2^(-8/n), 2^(-16/n), ... for n heads.

    If n is no power of two: those of the next lower power, then every second one of twice as many heads.

    Args:
        heads: how many.

    Returns:
        Tensor: float32 [heads].

    Raises:
        FlexValueError: `heads` is no positive integer.

    Example:
        >>> mods.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    _at_least("alibi_slopes", 1, heads=heads)
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes)


def alibi(slopes: Tensor) -> ScoreMod:
    """Take a penalty that grows with the distance, steeper for some heads.

    `slopes[h]` times this is added; with a causal mask only the lower half counts::

         0 +1 +2 +3
        -1  0 +1 +2
        -2 -1  0 +1

    Args:
        slopes: float [heads], from `alibi_slopes` or learnt.

    Returns:
        score_mod: like all functions of this page but `alibi_slopes`.

    Raises:
        FlexValueError: `slopes` does not have one dimension.

    Example:
        >>> score_mod = mods.alibi(mods.alibi_slopes(8))
        >>> score_mod(torch.zeros(4), 0, 0, 3, torch.arange(4))  # scores 0, head 0, query 3
        tensor([-1.5000, -1.0000, -0.5000,  0.0000])
    """
    _table("alibi", "slopes", slopes, 1)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def softcap(cap: float) -> ScoreMod:
    """Bend scores smoothly into (-cap, cap).

    As a picture::

         cap  - - - - ___--
                    _/
                   /
                __/
        -cap --  - - - - -

    Args:
        cap: a positive number.

    Raises:
        FlexValueError: it is not positive.

    Example:
        >>> mods.softcap(20.0)(torch.tensor([1.0, 30.0, 1000.0]), 0, 0, 0, 0)
        tensor([ 0.9992, 18.1030, 20.0000])
    """
    if not cap > 0:
        raise FlexValueError(f"softcap: cap: expected a positive number, got {cap!r}.")

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def relative_bias(table: Tensor) -> ScoreMod:
    """Add a learnt bias for each head and distance.

    Which columns of the table are added, with reach 2 and columns for the distances -2 to 2::

        2 1 0 0
        3 2 1 0
        4 3 2 1
        4 4 3 2

    Args:
        table: float [heads, 2 * reach + 1]. Farther distances count as `reach`.

    Raises:
        FlexValueError: the table has another shape.

    Example:
        >>> table = torch.zeros(2, 5, requires_grad=True)
        >>> query = torch.randn(1, 2, 8, 16)
        >>> flex_attention(query, query, query, mods.relative_bias(table)).sum().backward()
        >>> table.grad.shape
        torch.Size([2, 5])
    """
    _table("relative_bias", "table", table, 2)
    if table.shape[1] % 2 == 0:
        raise FlexValueError(
            f"relative_bias: table: expected an odd number of distances (2 * reach + 1), "
            f"got {table.shape[1]}."
        )
    reach = table.shape[1] // 2

    def relative_bias(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]

    return relative_bias


def relative_bias_2d(table: Tensor, width: int) -> ScoreMod:
    """Add a learnt bias for the offset between two tokens of an image.

    For query 0 of a 2 x 2 image::

        key 0: table[h, 1, 1]    key 1: table[h, 1, 0]
        key 2: table[h, 0, 1]    key 3: table[h, 0, 0]

    Args:
        table: float [heads, 2 * height - 1, 2 * width - 1].
        width: how many tokens a row of the image has.

    Raises:
        FlexValueError: the table has another shape.

    Example:
        >>> table = torch.arange(9.0).view(1, 3, 3)
        >>> index = torch.arange(4)
        >>> mods.relative_bias_2d(table, width=2)(torch.zeros(4, 4), 0, 0, index[:, None], index)
        tensor([[4., 3., 1., 0.],
                [5., 4., 2., 1.],
                [7., 6., 4., 3.],
                [8., 7., 5., 4.]])
    """
    _table("relative_bias_2d", "table", table, 3)
    if table.shape[2] != 2 * width - 1 or table.shape[1] % 2 == 0:
        raise FlexValueError(
            "relative_bias_2d: table: expected shape [heads, 2 * height - 1, 2 * width - 1] with width "
            f"{width}, got {tuple(table.shape)}."
        )
    height = table.shape[1] // 2 + 1

    def relative_bias_2d(score, b, h, q_idx, kv_idx):
        down = q_idx // width - kv_idx // width + height - 1
        right = q_idx % width - kv_idx % width + width - 1
        return score + table[h, down, right]

    return relative_bias_2d


def t5_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Add T5's bias: near distances have a bucket each, far ones share logarithmically wider buckets.

    One direction of 32 buckets::

        distance  0 1 2 ... 7 8-11 12-15 16-22 23-31 ...
        bucket    0 1 2 ... 7 8    9     10    11    ...

    Args:
        table: float [buckets, heads].
        bidirectional: whether half of the buckets are for later keys; else these count as distance 0.
        max_distance: from here on all distances share the last bucket.

    Raises:
        FlexValueError: the table has another shape or too few buckets, or `max_distance` is too small.

    Example:
        >>> buckets = torch.arange(32.0)[:, None]
        >>> mods.t5_bias(buckets)(0, 0, 0, 100, torch.tensor([100, 99, 80, 0, 101, 120]))
        tensor([ 0.,  1., 10., 15., 17., 26.])
    """
    _table("t5_bias", "table", table, 2)
    one_way = table.shape[0] // (2 if bidirectional else 1)
    exact = one_way // 2
    if exact < 1 or max_distance <= exact:
        raise FlexValueError(
            f"t5_bias: expected at least {4 if bidirectional else 2} buckets and max_distance above {exact}, "
            f"got {table.shape[0]} buckets and max_distance {max_distance}."
        )

    def t5_bias(score, b, h, q_idx, kv_idx):
        ahead = kv_idx - q_idx
        distance = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        far = (exact + (ratio * (one_way - exact)).to(torch.int64)).clamp(max=one_way - 1)
        bucket = torch.where(distance < exact, distance, far)
        if bidirectional:
            bucket = bucket + torch.where(ahead > 0, one_way, 0)
        return score + table[bucket, h]

    return t5_bias


def sandwich(heads: int, length: int, dim: int = 128) -> ScoreMod:
    """Add the product of two sinusoidal position embeddings, which decays with waves.

    It is 8 (h + 1) / heads times the sum of cos(d / 10000^(2i / dim)) - 1 over i < dim / 2::

         0 ..
             `._.-.
                   `-._.--.___

    Args:
        heads: how many.
        length: the most tokens between a query and a key, and one.
        dim: of the embeddings.

    Raises:
        FlexValueError: a number is too small or no integer.

    Example:
        >>> mods.sandwich(heads=8, length=64)(0, 0, 0, 63, torch.tensor([63, 62, 48, 0]))
        tensor([  0.0000,  -1.9063, -23.5167, -34.7146])
    """
    _at_least("sandwich", 1, heads=heads, length=length)
    _at_least("sandwich", 2, dim=dim)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    waves = (torch.arange(length, dtype=torch.float64)[:, None] * frequencies).cos().sub(1).sum(1)
    ratios = torch.arange(1, heads + 1, dtype=torch.float64) * 8 / heads
    table = (ratios[:, None] * waves).float()

    def sandwich(score, b, h, q_idx, kv_idx):
        return score + table[h, (q_idx - kv_idx).abs()]

    return sandwich


def soft_distance(radius: int, slope: float) -> ScoreMod:
    """Leave scores within `radius` as they are, and take `slope` for each token farther away.

    Radius 1, slope 2::

         0  0 -2 -4
         0  0  0 -2
        -2  0  0  0

    Args:
        radius: a number of tokens.
        slope: a number.

    Raises:
        FlexValueError: `radius` is negative or no integer.

    Example:
        >>> mods.soft_distance(radius=1, slope=2.0)(torch.zeros(5), 0, 0, 2, torch.arange(5))
        tensor([-2.,  0.,  0.,  0., -2.])
    """
    _at_least("soft_distance", 0, radius=radius)

    def soft_distance(score, b, h, q_idx, kv_idx):
        return score - slope * ((q_idx - kv_idx).abs() - radius).clamp(min=0)

    return soft_distance


def _table(function: str, name: str, table: Tensor, dims: int) -> None:
    if not isinstance(table, Tensor) or table.dim() != dims:
        came = f"shape {tuple(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise FlexValueError(f"{function}: {name}: expected a {dims}-d tensor, got {came}.")


def _at_least(function: str, least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < least:
            raise FlexValueError(
                f"{function}: {name}: expected an integer of at least {least}, got {number!r}."
            )
