"""The calls that are measured on a card, most telling first, and the sides that serve each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_inductor.masks import library

OURS, FLEX, FLEX_FLASH, FLASH, CUDNN = "ours", "torch flex", "torch flex FLASH", "SDPA flash", "SDPA cuDNN"
OTHERS = (FLEX, FLEX_FLASH, FLASH, CUDNN)
FORWARD, BACKWARD = "forward", "backward"
TOKENS = 16384  # in a batch, so that every length does comparable work
DOCUMENTS = 8
WINDOW = 1024


@dataclass(frozen=True)
class Case:
    """One call. `aims` holds what is aimed at by pass and side: its time over ours, or "share" of what the card can."""

    variant: str
    head_dim: int
    length: int
    heads: int = 16
    kv_heads: int = 16
    aims: dict[tuple[str, str], float] = field(default_factory=dict, hash=False)
    batch: int | None = None  # as many as TOKENS make

    @property
    def title(self) -> str:
        return f"{self.variant} D{self.head_dim} S{self.length}"

    @property
    def decoding(self) -> bool:
        return self.variant == "decode"

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD,) if self.decoding else (FORWARD, BACKWARD)

    @property
    def pairs(self) -> float:
        """How many (query, key) pairs of a head the mask leaves."""
        n = self.length
        if self.decoding:
            return n
        if self.variant == "window":
            return WINDOW * n - WINDOW * (WINDOW - 1) / 2
        parts = DOCUMENTS if self.variant == "documents" else 1
        return n * (n / parts + 1) / 2

    def sizes(self) -> tuple[int, int]:
        """Batch and number of queries."""
        batch = 4 if self.decoding else max(1, TOKENS // self.length)
        return self.batch or batch, 1 if self.decoding else self.length

    def work(self, which: str) -> float:
        """Operations, so that dividing by milliseconds gives TFLOP/s; for decode bytes read, for GB/s."""
        batch, _ = self.sizes()
        if self.decoding:
            return 2 * batch * self.kv_heads * self.length * self.head_dim * 2 / 1e6
        products = 2 if which == FORWARD else 5
        return batch * self.heads * self.pairs * self.head_dim * 2 * products / 1e9

    def small(self) -> Case:
        """The same kind of call, small enough for an interpreter."""
        return replace(
            self, head_dim=16, length=64, heads=2, kv_heads=1 if self.kv_heads < self.heads else 2, batch=1
        )


def _case(
    variant: str, head_dim: int, length: int, heads: int = 16, kv_heads: int = 16, **aims: dict[str, float]
) -> Case:
    named = {(which, side): aim for which, sides in aims.items() for side, aim in sides.items()}
    return Case(variant, head_dim, length, heads, kv_heads, named)


CASES = (
    _case("causal", 128, 8192, forward={FLEX: 1.5, CUDNN: 0.9}, backward={FLEX: 2, CUDNN: 0.85}),
    _case("documents", 128, 8192, forward={FLEX: 1.8}, backward={FLEX: 2.5}),
    _case("bias", 128, 8192, backward={FLEX: 3}),
    _case("decode", 128, 32768, 64, 8, forward={"share": 0.75}),
    _case("causal", 64, 8192),
    _case("GQA 8:1", 128, 8192, 16, 2),
    _case("alibi", 128, 8192),
    _case("window", 128, 8192),
    _case("causal", 256, 8192),
    _case("causal", 128, 2048),
    _case("causal", 128, 16384),
    _case("bias", 64, 8192),
    _case("documents", 64, 8192),
    _case("alibi", 64, 8192),
    _case("window", 64, 16384),
    _case("decode", 64, 8192, 64, 8),
    _case("GQA 8:1", 64, 16384, 16, 2),
    _case("causal", 64, 2048),
    _case("causal", 256, 2048),
    _case("documents", 256, 8192),
    _case("alibi", 256, 8192),
    _case("bias", 256, 8192),
    _case("causal", 128, 4096),
)


class Side(NamedTuple):
    """One implementation; `configs` is for ours, as `options={"configs": ...}` takes it."""

    who: str = OURS
    configs: dict[str, dict[str, int]] | None = None

    @property
    def name(self) -> str:
        if self.configs is None:
            return self.who
        kernels = (
            f"{kernel} {' '.join(f'{name}={size}' for name, size in sizes.items()) or 'as it is'}"
            for kernel, sizes in self.configs.items()
        )
        return ", ".join(kernels)


def sides_of(case: Case) -> list[Side]:
    """Ours first, then those of others that can serve the call."""
    sides = [Side(), Side(FLEX)]
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        sides.append(Side(FLEX_FLASH))
    if case.variant in ("causal", "decode", "GQA 8:1"):
        sides += [Side(FLASH), Side(CUDNN)]
    return sides


def tensors_of(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    batch, queries = case.sizes()
    sizes = [
        (case.heads, queries),
        (case.kv_heads, case.length),
        (case.kv_heads, case.length),
        (case.heads, queries),
    ]
    found = [torch.randn(batch, heads, n, case.head_dim, dtype=dtype, device=device) for heads, n in sizes]
    return [*(t.requires_grad_(not case.decoding) for t in found[:3]), found[3]]


def mods_of(case: Case, device: str) -> tuple[Callable | None, tuple[Tensor, ...], Callable | None]:
    """score_mod, what of it needs a gradient, and mask_mod."""
    length = case.length
    slopes = torch.exp2(-torch.arange(1, case.heads + 1, device=device) / 2)
    bias = torch.randn(2 * length, device=device, requires_grad=True)
    document = torch.arange(length, device=device) * DOCUMENTS // length
    scores: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
        "alibi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), ()),
        "bias": (lambda s, b, h, q, k: s + bias[q - k + length], (bias,)),
    }
    masks: dict[str, Any] = {
        "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "decode": None,
    }
    return *scores.get(case.variant, (None, ())), masks.get(case.variant, library.causal())
