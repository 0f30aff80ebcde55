"""The score_mods and mask_mods of torch's, FlashAttention 4's and cuDNN's tests, and what they capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numbers import Numbers


class Shape(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int


class Mod(NamedTuple):
    """`build` of what `captures` gives is the mod, for a product's call and for dense attention alike."""

    build: Callable[..., Any]
    captures: Callable[[Shape, Numbers], tuple] = lambda shape, numbers: ()


def _where(condition: Callable) -> Mod:
    return Mod(lambda: lambda score, b, h, q, kv: torch.where(condition(q, kv), score, -float("inf")))


SCORES: dict[str, Mod] = {
    # torch, test_flex_attention.py
    "times_two": Mod(lambda: lambda score, b, h, q, kv: score * 2),
    "squared": Mod(lambda: lambda score, b, h, q, kv: score * score),
    "causal": _where(lambda q, kv: q >= kv),
    "inverse_causal": _where(lambda q, kv: q <= kv),
    "rel_bias": Mod(lambda: lambda score, b, h, q, kv: score + (q - kv)),
    "rel_causal": Mod(
        lambda: lambda score, b, h, q, kv: torch.where(q >= kv, score + (q - kv), -float("inf"))
    ),
    "alibi": Mod(lambda: lambda score, b, h, q, kv: score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / 8))),
    # FlashAttention 4, score_mod_definitions.py
    "distance": Mod(lambda: lambda score, b, h, q, kv: score + torch.abs(q - kv)),
    "twice_distance": Mod(lambda: lambda score, b, h, q, kv: score + 2 * torch.abs(q - kv)),
    "alibi_4": Mod(lambda: lambda score, b, h, q, kv: score - 2 ** (-8 * (h + 1) / 8) * torch.abs(q - kv)),
    "sliding_window": _where(lambda q, kv: torch.abs(q - kv) <= 256),
    "block_diagonal": _where(lambda q, kv: q // 64 == kv // 64),
    "causal_v2": _where(lambda q, kv: q - kv >= 0),
    "batch_bias": Mod(
        lambda bias: lambda score, b, h, q, kv: score + bias[b], lambda s, numbers: (numbers.normal(s.batch),)
    ),
    "dual_buffer": Mod(
        lambda of_head, of_query: lambda score, b, h, q, kv: score + of_head[h] + of_query[q],
        lambda s, numbers: (numbers.normal(s.heads), numbers.normal(s.queries)),
    ),
    # cuDNN
    "bias": Mod(
        lambda bias: lambda score, b, h, q, kv: score + bias[h, q, kv],
        lambda s, numbers: (numbers.normal(s.heads, s.queries, s.keys),),
    ),
}


def _document(shape: Shape, numbers: Numbers) -> tuple[Tensor]:
    cuts = torch.tensor([numbers.below(max(shape.queries, shape.keys)) for _ in range(3)])
    return ((torch.arange(max(shape.queries, shape.keys)).unsqueeze(1) >= cuts).sum(1),)


def _shift(shape: Shape, numbers: Numbers) -> tuple[Tensor]:
    return (torch.tensor(shape.keys - shape.queries),)


def _sliding(size: int) -> Mod:
    return Mod(lambda shift: lambda b, h, q, kv: (kv >= q + shift - size) & (kv <= q + shift), _shift)


MASKS: dict[str, Mod] = {
    "causal": Mod(lambda: lambda b, h, q, kv: q >= kv),
    "inverse_causal": Mod(lambda: lambda b, h, q, kv: q <= kv),
    "noop": Mod(lambda: lambda b, h, q, kv: kv >= 0),
    "offset": Mod(lambda: lambda b, h, q, kv: 192 + q >= kv),
    "aligned_causal": Mod(lambda shift: lambda b, h, q, kv: kv <= q + shift, _shift),
    "block_causal": Mod(lambda shift: lambda b, h, q, kv: kv <= q + shift, _shift),
    "block_diagonal": Mod(lambda: lambda b, h, q, kv: q // 128 == kv // 128),
    "mini_causal": Mod(lambda: lambda b, h, q, kv: q % 128 >= kv % 128),
    "prefix_lm": Mod(lambda: lambda b, h, q, kv: ((q < 512) & (kv < 512)) | (q >= kv)),
    "dilated_sliding_window": Mod(
        lambda: lambda b, h, q, kv: (q >= kv) & (q - kv < 256) & ((q - kv) % 2 == 0)
    ),
    "sliding_window_128": _sliding(128),
    "sliding_window_256": _sliding(256),
    "sliding_window_512": _sliding(512),
    "document": Mod(lambda document: lambda b, h, q, kv: document[q] == document[kv], _document),
    # cuDNN: padding and a band, each batch with lengths and a shift of its own
    "band": Mod(
        lambda lengths_q, lengths_k, shifts, left, right: (
            lambda b, h, q, kv: (
                (q < lengths_q[b])
                & (kv < lengths_k[b])
                & (kv <= q + shifts[b] + right)
                & (kv >= q + shifts[b] - left)
            )
        )
    ),
    "tiles": Mod(
        lambda allowed: lambda b, h, q, kv: allowed[q // 128, kv // 128],
        lambda s, numbers: (numbers.normal(-(-s.queries // 128), -(-s.keys // 128)) > 0,),
    ),
}
