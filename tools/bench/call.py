"""One attention call that benches make: its mods, its tensors, and what it should give."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flex_inductor import create_block_mask, flex_attention, mods, set_eager_kernels
from flex_inductor.masks import library
from flex_inductor.reference import over_lanes

WINDOW = 1024


@dataclass(frozen=True)
class Call:
    """What is called. `aims` holds ratios that are aimed at, by side: its time over ours."""

    variant: str  # of MASKS or MODS; others are causal, without a score_mod
    length: int
    head_dim: int = 64
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True
    aims: Mapping[Any, float] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        return f"{self.variant} D{self.head_dim} S{self.length}"

    @property
    def decoding(self) -> bool:
        return self.variant == "decode"

    @property
    def gqa(self) -> bool:
        return self.heads != self.kv_heads


def documents(length: int, count: int = 8) -> Tensor:
    """Each token's document, of `count` with random borders."""
    generator = torch.Generator().manual_seed(0)
    borders = torch.randint(0, length, (count - 1,), generator=generator).sort().values
    return torch.searchsorted(borders, torch.arange(length), right=True)


MASKS: dict[str, Callable[[Call, Any], Any]] = {
    "decode": lambda call, device: None,
    "window": lambda call, device: library.sliding_window(WINDOW),
    "window 512": lambda call, device: library.sliding_window(512),
    "documents": lambda call, device: library.document(documents(call.length).to(device)),
}


def _relative_bias(call: Call, device: Any) -> tuple[Callable, tuple[Tensor, ...]]:
    table = torch.zeros(call.heads, 2 * call.length - 1, device=device).uniform_(-1, 1).requires_grad_()
    return mods.relative_bias(table), (table,)


def _bias(call: Call, device: Any) -> tuple[Callable, tuple[Tensor, ...]]:
    """One number for each distance."""
    length, bias = call.length, torch.randn(2 * call.length, device=device, requires_grad=True)
    return lambda s, b, h, q, k: s + bias[q - k + length], (bias,)


MODS: dict[str, Callable[[Call, Any], tuple[Callable, tuple[Tensor, ...]]]] = {
    "alibi": lambda call, device: (mods.alibi(mods.alibi_slopes(call.heads).to(device)), ()),
    "softcap": lambda call, device: (mods.softcap(20.0), ()),
    "relative bias": _relative_bias,
    "bias": _bias,
}


class Made:
    """A call's tensors and mods."""

    def __init__(self, call: Call, device: Any = "cpu"):
        self.call = call
        queries = 1 if call.decoding else call.length
        sizes = [(call.heads, queries), *[(call.kv_heads, call.length)] * 2, (call.heads, queries)]
        shapes = [(call.batch, heads, length, call.head_dim) for heads, length in sizes]
        tensors = [torch.randn(shape, dtype=call.dtype, device=device) for shape in shapes]
        self.inputs, self.grad = [t.requires_grad_(call.backward) for t in tensors[:3]], tensors[3]
        self.captures: tuple[Tensor, ...]
        mod, self.captures = MODS.get(call.variant, lambda *_: (None, ()))(call, device)
        self.mask_mod = MASKS.get(call.variant, lambda *_: library.causal())(call, device)
        mask = self.mask_mod and create_block_mask(
            self.mask_mod, None, None, queries, call.length, device=device
        )
        self.options: dict[str, Any] = {"score_mod": mod, "block_mask": mask, "enable_gqa": call.gqa}
        if call.variant == "dropout":
            state = tuple(torch.tensor(number, device=device) for number in (1, 2))
            self.options |= {"dropout_p": 0.1, "rng_state": state}

    def results(self, attend: Callable, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The output and the gradients that are wanted, with inputs of this dtype."""
        inputs = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in self.inputs]
        with torch.set_grad_enabled(self.call.backward):
            out = attend(*inputs)
        wanted = [*inputs, *self.captures] if self.call.backward else []
        return [out.detach(), *(torch.autograd.grad(out, wanted, self.grad.to(dtype)) if wanted else ())]

    def gold(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """What uncompiled attention gives in a wide dtype."""
        before = set_eager_kernels("never")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                return self.results(lambda *qkv: flex_attention(*qkv, **self.options), dtype)
        finally:
            set_eager_kernels(before)

    def allowed(self) -> Tensor:
        """[1, 1, queries, keys]: the mask as flags. The masks here ask for no head."""
        return over_lanes(self.mask_mod, ())(*self._indices())[:1, :1].contiguous()

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention as one would write it without any kernel."""
        indices = self._indices()
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
        scores = query @ key.mT / math.sqrt(query.size(-1))
        if self.options["score_mod"] is not None:
            scores = over_lanes(self.options["score_mod"], (0,))(scores, *indices)
        if self.mask_mod is not None:
            scores = torch.where(over_lanes(self.mask_mod, ())(*indices), scores, -math.inf)
        return scores.softmax(-1).to(value.dtype) @ value

    def _indices(self) -> list[Tensor]:
        query, key, _ = self.inputs
        return [torch.arange(size) for size in (*query.shape[:3], key.size(2))]
