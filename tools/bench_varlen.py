"""`flex-inductor bench varlen`: packed sequences next to padded ones, and caches in pages next to whole ones.

All sides of a case compute the same attention and take turns in one process, in the opposite order every second round.
Shown are the median over the rounds and the middle half of them, and how many pairs of query and key a side has to
compute, as a multiple of the first side's. Before it is timed, each side's longest sequence is checked in fp64.
Freed memory stays with the process: glibc would clear that of large results anew in each step.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flex_inductor import Sequences, create_block_mask, flex_attention, pad, varlen_attention

from .bench_cpu import machine
from .cases import selected
from .files import to_write
from .rounds import Spread, alternate, keep_freed_memory, milliseconds, over

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
    of_longest: Callable[
        [Sequence[Tensor]], Sequence[Tensor]
    ]  # of its results, those of the longest sequence
    pairs: int


@dataclass(frozen=True)
class Result:
    case: str
    side: str
    ms: Spread
    ratio: Spread  # its time over the first side's
    pairs: float  # over the first side's


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "varlen", help="packed sequences and paged caches on the CPU", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write the results")
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--rounds", type=int, default=8, help="how often each side runs (default 8)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    keep_freed_memory()
    results = [result for case in chosen for result in measure(case, arguments.rounds)]
    Console().print(table_of(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(), "results": [asdict(r) for r in results]}, file, indent=2)
    return 0


def measure(case: Case, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sides, gold = (decoding if case.page_sizes else training)(case)
    for name, side in sides.items():
        _check(name, side.of_longest(side.step()), gold)
    times = alternate({name: partial(milliseconds, side.step) for name, side in sides.items()}, rounds)
    first = next(iter(sides))
    return [
        Result(
            case.title,
            name,
            Spread.of(times[name]),
            over(times[name], times[first]),
            side.pairs / sides[first].pairs,
        )
        for name, side in sides.items()
    ]


def training(case: Case) -> tuple[dict[str, Side], list[Tensor]]:
    from flex_inductor.backend import flex_inductor

    lengths, longest = torch.tensor(case.lengths), max(case.lengths)
    sequences = Sequences.from_lengths(lengths)
    sizes = (
        [(case.heads, case.head_dim)] + [(case.kv_heads, case.head_dim)] * 2 + [(case.heads, case.head_dim)]
    )
    packed = [torch.randn(sum(case.lengths), *size, dtype=case.dtype) for size in sizes]
    there = torch.arange(longest) < lengths[:, None]
    padded = [pad(tensor, there).transpose(1, 2) for tensor in packed]
    gqa = case.heads != case.kv_heads
    compiled = partial(torch.compile, backend=flex_inductor, dynamic=False)
    of_packed = compiled(
        partial(varlen_attention, sequences=sequences, block_mask=sequences.mask(causal), enable_gqa=gqa)
    )
    mask = create_block_mask(causal, None, None, longest, longest, device="cpu")
    of_padded = compiled(partial(flex_attention, block_mask=mask, enable_gqa=gqa))
    of_torch = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=gqa)

    def side(attend: Callable[..., Tensor], given: list[Tensor], pairs: int, chosen: Any) -> Side:
        *inputs, grad = given
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]

        def step() -> list[Tensor]:
            out = attend(*inputs)
            return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

        return Side(step, lambda results: [chosen(result) for result in results], pairs)

    at = case.lengths.index(longest)
    rows = slice(*sequences.cu_q[at : at + 2].tolist())
    squares, all_pairs = sum(n * n for n in case.lengths), len(lengths) * longest**2
    sides = {
        PACKED: side(of_packed, packed, squares, lambda t: t[rows].transpose(0, 1)),
        PADDED: side(of_padded, padded, all_pairs, lambda t: t[at]),
        SDPA: side(of_torch, padded, all_pairs, lambda t: t[at]),
    }
    query, key, value, grad = (tensor[at].double() for tensor in padded)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = _dense(query, key, value, torch.ones(longest, longest, dtype=torch.bool).tril())
    return sides, [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def decoding(case: Case) -> tuple[dict[str, Side], list[Tensor]]:
    """One query for each sequence."""
    from flex_inductor.backend import flex_inductor

    count, longest = len(case.lengths), max(case.lengths)
    room = -(-longest // max(case.page_sizes)) * max(case.page_sizes)
    used = torch.tensor(case.lengths, dtype=torch.int32)
    each = torch.arange(count + 1, dtype=torch.int32)
    query = torch.randn(count, case.heads, case.head_dim, dtype=case.dtype)
    key, value = (torch.randn(count, room, case.kv_heads, case.head_dim, dtype=case.dtype) for _ in range(2))
    gqa = case.heads != case.kv_heads
    places: dict[str, tuple[Sequences, Tensor, Tensor]] = {}
    for size in case.page_sizes:
        pages = torch.randperm(count * room // size)
        # Page i of the cache lies at pages[i] of the pool.
        pools = [torch.empty_like(t).view(-1, size, *t.shape[2:]) for t in (key, value)]
        for pool, cache in zip(pools, (key, value), strict=True):
            pool[pages] = cache.view(pool.shape)
        table = pages.to(torch.int32).view(count, -1)
        sequences = Sequences(each, used_k=used, pages=table, page_size=size, max_q=1)
        places[f"pages of {size}"] = (sequences, pools[0], pools[1])
    places[WHOLE] = (Sequences(each, used_k=used, max_q=1, max_k=room), key, value)

    def side(sequences: Sequences, keys: Tensor, values: Tensor) -> Side:
        attend = torch.compile(
            partial(varlen_attention, sequences=sequences, block_mask=sequences.mask(), enable_gqa=gqa),
            backend=flex_inductor,
            dynamic=False,
        )
        return Side(lambda: [attend(query, keys, values)], lambda found: [found[0][at]], sum(case.lengths))

    at = case.lengths.index(longest)
    sides = {name: side(*given) for name, given in places.items()}
    there = (torch.arange(room) < used[:, None])[:, None, None]
    padded = (query[:, :, None], key.transpose(1, 2), value.transpose(1, 2))
    of_torch = partial(scaled_dot_product_attention, attn_mask=there, enable_gqa=gqa)
    sides[SDPA] = Side(lambda: [of_torch(*padded)], lambda found: [found[0][at, :, 0]], count * room)
    q, k, v = (tensor[at].double() for tensor in padded)
    gold = _dense(q, k, v, there[at, 0])
    return {name: _without_grad(side) for name, side in sides.items()}, [gold[:, 0]]


def _without_grad(side: Side) -> Side:
    return Side(torch.no_grad()(side.step), side.of_longest, side.pairs)


def _dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    key, value = (t.repeat_interleave(query.size(0) // t.size(0), 0) for t in (key, value))
    scores = query @ key.mT / math.sqrt(query.size(-1))
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ value


def _check(name: str, found: Sequence[Tensor], gold: list[Tensor]) -> None:
    for got, want in zip(found, gold, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        bound = (64 if got.dtype is torch.float32 else 8) * torch.finfo(got.dtype).eps
        if not error < bound:
            raise RuntimeError(f"{name} is wrong: relative error {error:.2g}, expected below {bound:.2g}")


def table_of(results: list[Result]) -> Any:
    from rich.table import Table

    facts = machine()
    table = Table(
        title=f"{facts['cpu']}, {facts['vectors']}, {facts['threads']} threads, torch {facts['torch']}"
    )
    table.add_column("case")
    table.add_column("side")
    for column in ("ms", "over the first", "pairs"):
        table.add_column(column, justify="right")
    last = None
    for result in results:
        if last not in (None, result.case):
            table.add_section()
        case = result.case if result.case != last else ""
        table.add_row(case, result.side, str(result.ms), str(result.ratio), f"{result.pairs:.3g}x")
        last = result.case
    return table
