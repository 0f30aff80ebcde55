"""Dropout's rule once more, score by score: docs/softmax.md has it in words. Nothing here is what kernels use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: Sequence[Any], key: Sequence[int]) -> list[Any]:
    """Philox 4x32 with 7 rounds: four words, numbers or arrays that broadcast, of four words and two."""
    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    for number in range(7):
        keys = [
            np.uint64((k + number * step) % 2**32)
            for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        a, c = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(c >> _HALF) ^ x[1] ^ keys[0], c & _LOW, (a >> _HALF) ^ x[3] ^ keys[1], a & _LOW]
    return x


def factors(given: Tensor, lanes: dict[str, Tensor]) -> Tensor:
    """What weights [b, h, q_idx, kv_idx] are multiplied with."""
    seed, offset, head_offset, dropped = map(int, given.tolist())
    axes = (lanes[name].cpu().numpy().astype(np.int64) for name in ("b", "h", "q_idx", "kv_idx"))
    b, h, q, kv = np.ix_(*axes)
    counter = [kv & ~24, q & ~8, (h + head_offset) * 2**21 + b, np.int64(offset)]
    words = philox([word.astype(np.uint64) & _LOW for word in counter], [seed % 2**32, (seed >> 32) % 2**32])
    chosen = np.choose((q & 8) // 4 + (kv & 8) // 8, np.broadcast_arrays(*words))
    kept = chosen // np.where(kv & 16, 2**16, 1).astype(np.uint64) % np.uint64(2**16) >= np.uint64(dropped)
    return torch.from_numpy(kept * (65536 / (65536 - dropped))).to(given.device)
