"""Dropout's rule once more, score by score: docs/softmax.md has it in words. Nothing here is what kernels use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low word of a product of two words, by halves: nothing leaves int64."""
    low, high = x * (factor % 2**16), x * (factor // 2**16)
    middle = high + low // 2**16
    return middle // 2**16, middle % 2**16 * 2**16 + low % 2**16


def philox(counter: Sequence[Any], key: Sequence[int]) -> list[Any]:
    """Philox 4x32 with 7 rounds: four words, numbers or tensors that broadcast, of four words and two."""
    x = list(counter)
    for number in range(7):
        keys = [(k + number * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        (first, low_first), (third, low_third) = _product(x[0], 0xD2511F53), _product(x[2], 0xCD9E8D57)
        x = [third ^ x[1] ^ keys[0], low_third, first ^ x[3] ^ keys[1], low_first]
    return x


def factors(given: Tensor, lanes: dict[str, Tensor]) -> Tensor:
    """What weights [b, h, q_idx, kv_idx] are multiplied with."""
    seed, offset, head_offset, dropped = map(int, given.tolist())
    axes = [lanes[name].long() for name in ("b", "h", "q_idx", "kv_idx")]
    b, h, q, kv = (axis.view(-1, *(1,) * (3 - i)) for i, axis in enumerate(axes))
    shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
    counter = [kv & ~24, q & ~8, (h + head_offset) * 2**21 + b, torch.full_like(b[:1], offset % 2**32)]
    words = philox([word % 2**32 for word in counter], [seed % 2**32, (seed >> 32) % 2**32])
    which = ((q & 8) // 4 + (kv & 8) // 8).expand(shape).unsqueeze(0)
    chosen = torch.stack([word.expand(shape) for word in words]).gather(0, which).squeeze(0)
    half = torch.where(kv & 16 > 0, chosen // 2**16, chosen % 2**16)
    return (half >= dropped).double() * (65536 / (65536 - dropped))
