"""`flex-inductor bench varlen`: packed sequences next to padded ones, and caches in pages next to whole ones.

All sides of a case compute the same attention and take turns in one process, in the opposite order every second round.
Shown are the median over the rounds and the middle half of them, and how many pairs of query and key a side has to
compute, as a multiple of the first side's. Before it is timed, each side's longest sequence is checked in fp64.
Freed memory stays with the process: glibc would clear that of large results anew in each step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flex_inductor import Sequences, create_block_mask, flex_attention, pad, varlen_attention
from flex_inductor.reference import reference

from .harness import Result, alternate, check, keep_freed_memory, milliseconds, results_of, rounds

HELP = "packed sequences and paged caches on the CPU"
OPTIONS = rounds(8)
COLUMNS = ("side", "ms", "over the first", "pairs")
PACKED, PADDED, SDPA = "packed", "padded", "SDPA padded"
WHOLE = "whole rows"


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


@dataclass(frozen=True)
class Case:
    """Training steps on packed sequences, or steps of decoding with a cache of these lengths."""

    name: str
    lengths: tuple[int, ...]
    page_sizes: tuple[int, ...] = ()  # of a decoding step
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        what = "decoding" if self.page_sizes else "forward+backward"
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{self.name}, {len(self.lengths)} sequences, {sum(self.lengths):,} tokens, {dtype} {what}"

    @property
    def gqa(self) -> bool:
        return self.heads != self.kv_heads


def _mixed(count: int, total: int) -> tuple[int, ...]:
    """As many lengths, log-normal, of this sum."""
    weights = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul(0.7).exp()
    lengths = (weights / weights.sum() * total).long().clamp(min=1)
    lengths[0] += total - lengths.sum()
    return tuple(lengths.tolist())


CASES = (
    Case("mixed lengths", _mixed(64, 32768)),
    Case("equal lengths", (512,) * 64),
    Case("mixed lengths", _mixed(64, 1 << 18), (16, 64), heads=8, kv_heads=2),
    Case("mixed lengths", _mixed(64, 1 << 18), (16, 64), heads=8, kv_heads=2, dtype=torch.bfloat16),
)


@dataclass(frozen=True)
class Side:
    step: Callable[[], Sequence[Tensor]]  # what is timed
    of_longest: Callable[[Tensor], Tensor]  # of a result, the longest sequence's
    pairs: int


def measure(case: Case, arguments: Namespace) -> list[Result]:
    keep_freed_memory()
    torch.manual_seed(0)
    torch._dynamo.reset()
    sides, gold = (decoding if case.page_sizes else training)(case)
    for side in sides.values():
        check([*map(side.of_longest, side.step())], gold, case.dtype)
    fewest = next(iter(sides.values())).pairs
    steps = {name: partial(milliseconds, side.step) for name, side in sides.items()}
    times = alternate(steps, arguments.rounds)
    return results_of(case.title, times, lambda name, _: {"pairs": sides[name].pairs / fewest})


def _compiled(attention: Callable, **options: Any) -> Callable:
    from flex_inductor.backend import flex_inductor

    return torch.compile(partial(attention, **options), backend=flex_inductor, dynamic=False)


def training(case: Case) -> tuple[dict[str, Side], list[Tensor]]:
    lengths, longest = torch.tensor(case.lengths), max(case.lengths)
    sequences = Sequences.from_lengths(lengths)
    sizes = [case.heads, case.kv_heads, case.kv_heads, case.heads]
    packed = [torch.randn(sum(case.lengths), heads, case.head_dim, dtype=case.dtype) for heads in sizes]
    there = torch.arange(longest) < lengths[:, None]
    padded = [pad(tensor, there).transpose(1, 2) for tensor in packed]
    mask = create_block_mask(causal, None, None, longest, longest, device="cpu")
    of_torch = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=case.gqa)

    def side(attend: Callable, given: Sequence[Tensor], pairs: int, of_longest: Callable) -> Side:
        return Side(partial(_step, attend, given), of_longest, pairs)

    at = case.lengths.index(longest)
    rows = slice(*sequences.cu_q[at : at + 2].tolist())
    squares, all_pairs = sum(n * n for n in case.lengths), len(lengths) * longest**2
    of_packed = _compiled(
        varlen_attention, sequences=sequences, block_mask=sequences.mask(causal), enable_gqa=case.gqa
    )
    of_padded = _compiled(flex_attention, block_mask=mask, enable_gqa=case.gqa)
    sides = {
        PACKED: side(of_packed, packed, squares, lambda t: t[rows].transpose(0, 1)),
        PADDED: side(of_padded, padded, all_pairs, lambda t: t[at]),
        SDPA: side(of_torch, padded, all_pairs, lambda t: t[at]),
    }
    alone = [tensor[at : at + 1].double() for tensor in padded]
    return sides, [t[0] for t in _step(lambda q, k, v: reference(q, k, v, block_mask=mask)[0], alone)]


def _step(attend: Callable, given: Sequence[Tensor]) -> list[Tensor]:
    *inputs, grad = given
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def decoding(case: Case) -> tuple[dict[str, Side], list[Tensor]]:
    """One query for each sequence."""
    count, longest = len(case.lengths), max(case.lengths)
    room = -(-longest // max(case.page_sizes)) * max(case.page_sizes)
    used = torch.tensor(case.lengths, dtype=torch.int32)
    each = torch.arange(count + 1, dtype=torch.int32)
    query = torch.randn(count, case.heads, case.head_dim, dtype=case.dtype)
    key, value = (torch.randn(count, room, case.kv_heads, case.head_dim, dtype=case.dtype) for _ in range(2))
    at = case.lengths.index(longest)

    def side(sequences: Sequences, keys: Tensor, values: Tensor) -> Side:
        mask = sequences.mask()
        attend = _compiled(varlen_attention, sequences=sequences, block_mask=mask, enable_gqa=case.gqa)
        step = torch.no_grad()(lambda: [attend(query, keys, values)])
        return Side(step, lambda found: found[at], sum(case.lengths))

    sides: dict[str, Side] = {}
    for size in case.page_sizes:
        pages = torch.randperm(count * room // size)
        # Page i of the cache lies at pages[i] of the pool.
        pools = [torch.empty_like(t).view(-1, size, *t.shape[2:]) for t in (key, value)]
        for pool, cache in zip(pools, (key, value), strict=True):
            pool[pages] = cache.view(pool.shape)
        table = pages.to(torch.int32).view(count, -1)
        sequences = Sequences(each, used_k=used, pages=table, page_size=size, max_q=1)
        sides[f"pages of {size}"] = side(sequences, pools[0], pools[1])
    sides[WHOLE] = side(Sequences(each, used_k=used, max_q=1, max_k=room), key, value)
    there = (torch.arange(room) < used[:, None])[:, None, None]
    padded = query[:, :, None], key.transpose(1, 2), value.transpose(1, 2)
    of_torch = partial(scaled_dot_product_attention, attn_mask=there, enable_gqa=case.gqa)
    sides[SDPA] = Side(lambda: [of_torch(*padded)], lambda found: found[at, :, 0], count * room)
    q, k, v = (tensor[at : at + 1].double() for tensor in padded)
    return sides, [reference(q, k[:, :, :longest], v[:, :, :longest])[0][0, :, 0]]
