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

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), 2^(-16/n), ... for n heads.

    If n is no power of two: those of the next lower power, then every second one of twice as many heads.
    """
    _at_least("alibi_slopes", 1, heads=heads)
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes)


def alibi(slopes: Tensor) -> ScoreMod:
    """A penalty that grows with the distance, steeper for some heads; see `alibi_slopes`.

     0 +1 +2 +3
    -1  0 +1 +2      times slopes[h]; with a causal mask only the lower half counts
    -2 -1  0 +1
    """
    _table("alibi", "slopes", slopes, 1)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def softcap(cap: float) -> ScoreMod:
    """Scores bent smoothly into (-cap, cap).

     cap  - - - - ___--
               _/
              /
           __/
    -cap --  - - - - -
    """
    if not cap > 0:
        raise FlexValueError(f"softcap: cap: expected a positive number, got {cap!r}.")

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def relative_bias(table: Tensor) -> ScoreMod:
    """A learned bias for each head and distance; `table` is [heads, 2 * reach + 1]. Farther distances count as `reach`.

    reach 2, columns of the table numbered 0 to 4 for a distance of -2 to 2:
    2 1 0 0
    3 2 1 0
    4 3 2 1
    4 4 3 2
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
    """A learned bias for the offset on an image whose rows have `width` tokens.

    `table` is [heads, 2 * height - 1, 2 * width - 1]. Entries for the four keys of a 2 x 2 image, query 0:

    key 0: table[h, 1, 1]    key 1: table[h, 1, 0]
    key 2: table[h, 0, 1]    key 3: table[h, 0, 0]
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
    """T5's buckets: near distances one by one, far ones logarithmically; `table` is [buckets, heads].

    distance  0 1 2 ... 7 8-11 12-15 16-22 23-31 ...   (one direction of 32 buckets)
    bucket    0 1 2 ... 7 8    9     10    11    ...
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
    """The product of two sinusoidal position embeddings as a bias, which decays with waves.

    bias(d) = 8 (h + 1) / heads * sum over i < dim / 2 of (cos(d / 10000^(2i / dim)) - 1)

     0 ..
         `._.-.
               `-._.--.___
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
    """No hard border: free within `radius`, then `slope` less for each token farther away.

    radius 1, slope 2:
     0  0 -2 -4
     0  0  0 -2
    -2  0  0  0
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
