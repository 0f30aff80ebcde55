"""Which weights dropout keeps: a function of a score's place alone, so that every route and tiling keeps the same.

Philox 4x32 with 7 rounds gives four words for the counter (kv without bits 3 and 4, q without bit 3, head << 21 plus
batch, offset). The score's word is number 2 * (bit 3 of q) + (bit 3 of kv), and of that the upper half where kv has bit
4. The weight is kept if this half is at least the number of 65536 weights that are left out.

A thread of a GPU's product holds rows 8 apart and columns 8 apart, keys as columns or as rows, so one counter serves
eight of its scores or four.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEVELS = 1 << 16  # a probability is so many of these
BATCHES = 1 << 21  # head * BATCHES + batch is a word
HEADS = 1 << 11
ROUNDS = 7
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD, _HALF = 0xFFFFFFFF, 0xFFFF


def levels(probability: float) -> int:
    """The number of LEVELS that is nearest; at least one weight in LEVELS is kept."""
    return min(round(probability * LEVELS), LEVELS - 1)


def scale_of(dropout: Tensor) -> Tensor:
    """What kept weights are multiplied with."""
    return LEVELS / (LEVELS - dropout[3].double())


def keeps(dropout: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Whether the weights at these indices, which broadcast, are kept. `dropout` is the op's input of that name."""
    words = _words(dropout, b, h, q_idx & ~8, kv_idx & ~24)
    first, second = (torch.where((kv_idx & 8) > 0, words[i + 1], words[i]) for i in (0, 2))
    word = torch.where((q_idx & 8) > 0, second, first)
    return (word >> (kv_idx & 16) & _HALF) >= dropout[3]


def keeps_of_tile(dropout: Tensor, lanes: Sequence[range]) -> Tensor:
    """The same for a tile's ranges of (b, h, q_idx, kv_idx), eight scores at once."""
    b, h = (torch.arange(at.start, at.stop, device=dropout.device) for at in lanes[:2])
    (q, first_q), (kv, first_kv) = (
        _counted(at, group, dropout.device) for at, group in zip(lanes[2:], (16, 32), strict=True)
    )
    words = _words(dropout, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), kv)
    halves = [word >> shift & _HALF for word in words for shift in (0, 16)]
    parts = torch.stack([half.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)) for half in halves], -1)
    # [b, h, groups of q, 8, groups of kv, 8, bit 3 of q, bit 3 of kv, bit 4 of kv], as [b, h, q, kv]
    found = parts.unflatten(-1, (2, 2, 2)).permute(0, 1, 2, 6, 3, 4, 8, 7, 5).flatten(5).flatten(2, 4)
    found = found.flatten(3)
    return found[:, :, first_q : first_q + len(lanes[2]), first_kv : first_kv + len(lanes[3])] >= dropout[3]


def _counted(at: range, group: int, device: torch.device) -> tuple[Tensor, int]:
    """The places of a range's groups that counters have, eight of each; which of all places is the first."""
    start = at.start // group * group
    groups = torch.arange(start, at.stop, group, device=device)
    return (groups.unsqueeze(1) + torch.arange(8, device=device)).flatten(), at.start - start


def _words(
    dropout: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed, offset, head_offset, _ = dropout.unbind()
    keys = [seed & _WORD, seed >> 32 & _WORD]
    of_head = (h + head_offset) * BATCHES + b
    c0, c1, c2, c3 = (index & _WORD for index in (kv, q, of_head, offset))
    for number in range(ROUNDS):
        key0, key1 = (key + number * step for key, step in zip(keys, _KEY_STEPS, strict=True))
        p0, p1 = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ key0) & _WORD, ((p0 >> 32) ^ c3 ^ key1) & _WORD
        c1, c3 = p1 & _WORD, p0 & _WORD
    return c0, c1, c2, c3
