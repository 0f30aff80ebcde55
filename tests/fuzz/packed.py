"""Random calls of varlen_attention, each sequence judged by a dense call of its own."""

from __future__ import annotations

import functools
import math
import random
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from flex_inductor import AuxRequest, Sequences, varlen_attention
from flex_inductor.reference import reference
from tests.support import Sizes, judge

from .calls import DTYPES, LONGEST, compilations, compiled, drawn, exact_in_fp32
from .mods import MASKS, SCORES, TRITON, capture, mask_mod_of, named_in, score_mod_of

BLOCKS = (16, 32, (16, 64), (64, 16), (16, 128), 128)
ALL = AuxRequest(lse=True, max_scores=True)


class Program(NamedTuple):
    """What needs a kernel of its own."""

    score: str | None = None
    mask: str | None = None
    dtype: str = "float32"
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    block: int | tuple[int, int] | None = None
    keys_in: str = "packed"  # or "rows", "pages"
    page_size: int = 16


class Batch(NamedTuple):
    """What changes from call to call of one kernel. Each sequence has so many queries and keys."""

    lengths: tuple[tuple[int, int], ...] = ((5, 5), (20, 20))
    gaps: tuple[int, int] = (0, 0)  # tokens of queries and of keys behind each sequence that belong to none
    scale: float = 0.25
    magnitude: float = 1.0
    shift: float = 0.5
    seed: int = 0


CAUSAL = ("q_idx >= kv_idx", "(q_idx >= kv_idx) & (q_idx - kv_idx < 9)", "(kv_idx - q_idx).abs() <= 7")


@st.composite
def programs(draw, route: str) -> Program:
    kv_heads = draw(st.integers(1, 2))
    dims = st.sampled_from([1, 3, 8, 16, 24, 33])
    keys_in = draw(st.sampled_from(["packed", "packed", "rows", "pages"]))
    fused = route in ("cpu", *TRITON)
    sizes = [16, 32, 48, 128] if fused else [1, 5, 16, 24, 48]
    page_size = draw(st.sampled_from(sizes))
    block = draw(st.sampled_from(BLOCKS))
    if route not in TRITON:  # whose backward has no tiles of one query
        block = draw(st.just(block) | st.none())
    if not fused:
        block = draw(st.just(block) | st.tuples(st.integers(1, 24), st.integers(1, 24)))
    if keys_in == "pages" and block is not None:
        queries, keys = block if isinstance(block, tuple) else (block, block)
        block = (queries, math.gcd(keys, page_size))
    return Program(
        draw(SCORES[route] | SCORES[route] | st.none()),
        draw(MASKS | st.sampled_from(CAUSAL) | st.none()),
        draw(st.sampled_from(DTYPES[route])),
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(dims),
        draw(dims),
        block,
        keys_in,
        page_size,
    )


def random_batch(route: str, draws: random.Random) -> Batch:
    longest = LONGEST[route] // 2

    def pair() -> tuple[int, int]:
        queries, keys = draws.randint(0, longest), draws.randint(0, longest)
        return draws.choice([(queries, keys), (keys, keys), (1, keys)])

    lengths = tuple(pair() for _ in range(draws.randint(1, 5)))
    if not any(q and k for q, k in lengths):
        lengths += ((1, 1),)
    gaps = draws.choice([(0, 0), (draws.randint(0, 3), draws.randint(0, 3))])
    return Batch(
        lengths, gaps, draws.choice([0.25, 1.0, -0.5]), draws.choice([1.0, 0.1, 3.0]),
        draws.choice([0.5, -1.5, 0.25]), draws.randint(0, 1000),
    )  # fmt: skip


several_batches = functools.partial(drawn, random_batch)


# Where tokens lie.


def _int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _offsets(rooms: list[int]) -> Tensor:
    return torch.nn.functional.pad(_int32(rooms).cumsum(0), (1, 0)).to(torch.int32)


class Places(NamedTuple):
    sequences: Sequences
    cache: tuple[int, int]  # rows and length, or pages and their size
    slots: Tensor  # for each packed key, where it is in the cache


def _places(program: Program, batch: Batch, generator: torch.Generator) -> Places:
    queries, keys = (list(side) for side in zip(*batch.lengths, strict=True))
    gap_q, gap_k = batch.gaps
    cu_q, used_q = _offsets([n + gap_q for n in queries]), _int32(queries) if gap_q else None
    draw = lambda *shape, most: torch.randint(0, most, shape, generator=generator)  # noqa: E731
    if program.keys_in == "packed":
        sequences = Sequences(
            cu_q, _offsets([n + gap_k for n in keys]), used_q=used_q, used_k=_int32(keys) if gap_k else None
        )
        return Places(sequences, (0, 0), torch.empty(0, dtype=torch.long))
    count, longest = len(keys), max(*keys, 1) + gap_k
    if program.keys_in == "rows":
        pads = draw(count, most=4)
        rows = torch.randperm(count + 2, generator=generator)[:count]
        used = _int32(keys) + pads
        sequences = Sequences(
            cu_q, used_q=used_q, used_k=used.int(), left_pad_k=pads.int(), cache_rows=rows.int(),
            max_k=longest + 3,
        )  # fmt: skip
        slots = [rows[n] * (longest + 3) + pads[n] + torch.arange(keys[n]) for n in range(count)]
        return Places(sequences, (count + 2, longest + 3), torch.cat(slots))
    size = program.page_size
    width = -(-longest // size) + 1
    pages = torch.randperm(count * width + 2, generator=generator)[: count * width].reshape(count, width)
    slots = [
        pages[n].repeat_interleave(size)[: keys[n]] * size + torch.arange(keys[n]) % size
        for n in range(count)
    ]
    needed = torch.arange(width) * size < _int32(keys)[:, None]
    table = torch.where(needed, pages, -5).int()
    sequences = Sequences(cu_q, used_q=used_q, used_k=_int32(keys), pages=table, page_size=size)
    return Places(sequences, (count * width + 2, size), torch.cat(slots))


def _in_cache(packed: Tensor, places: Places) -> Tensor:
    """[1, H, T, D] as [rows, length, H, D], with NaN wherever no token is."""
    tokens = packed.detach().squeeze(0).transpose(0, 1)
    rows, length = places.cache
    flat = tokens.new_full((rows * length, *tokens.shape[1:]), torch.nan)
    return flat.index_copy(0, places.slots, tokens).unflatten(0, (rows, length))


# A case.


def _tensors(program: Program, batch: Batch, generator: torch.Generator) -> list[Tensor]:
    """As the judge has them, [1, H, T, D]; what belongs to no sequence is NaN in keys and values."""
    gap_q, gap_k = batch.gaps
    gap_k = gap_k if program.keys_in == "packed" else 0
    rows = sum(n + gap_q for n, _ in batch.lengths)
    keys = sum(n + gap_k for _, n in batch.lengths)
    shapes = (
        (1, program.heads, rows, program.head_dim),
        (1, program.kv_heads, keys, program.head_dim),
        (1, program.kv_heads, keys, program.value_dim),
    )
    made = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    made[:2] = exact_in_fp32(program.score, [t * batch.magnitude**0.5 for t in made[:2]])
    start = 0
    for _, length in batch.lengths:
        for tensor in made[1:]:
            tensor[:, :, start + length : start + length + gap_k] = torch.nan
        start += length + gap_k
    return [t.to(getattr(torch, program.dtype)) for t in made]


def _alone(program: Program, batch: Batch, score_mod, mask_mod):
    """Each sequence by itself, where the call has it."""
    gap_q, gap_k = batch.gaps
    gap_k = gap_k if program.keys_in == "packed" else 0

    def attend(q, k, v, captures, _):
        mod = None if score_mod is None else score_mod(*captures)
        parts, row, key = [], 0, 0
        for sequence, (queries, keys) in enumerate(batch.lengths):
            shift = keys - queries

            def both(score, b, h, q_idx, kv_idx, at=sequence, shift=shift):
                if mod is not None:
                    score = mod(score, b + at, h, q_idx + shift, kv_idx)
                if mask_mod is None:
                    return score
                return torch.where(mask_mod(b + at, h, q_idx + shift, kv_idx), score, -torch.inf)

            rows, at = slice(row, row + queries), slice(key, key + keys)
            row, key = rows.stop + gap_q, at.stop + gap_k
            if queries and keys:  # vmap takes no empty dimension
                parts.append(reference(q[:, :, rows], k[:, :, at], v[:, :, at], both, None, batch.scale))
            empty = 0 if queries and keys else queries
            nothing = parts[-1][1].new_full if parts else q.new_full
            lse = nothing((1, program.heads, empty + gap_q), -torch.inf)
            parts.append((q.new_zeros(*lse.shape, program.value_dim), lse, lse))
        return tuple(torch.cat(found, 2) for found in zip(*parts, strict=True))

    return attend


def _shapes_to_torch(*trees) -> tuple:
    """Sizes as torch compiles for them: 0, 1, and any other."""
    leaves, spec = pytree.tree_flatten(trees)
    return spec, tuple(min(n, 2) for t in leaves if isinstance(t, Tensor) for n in t.shape)


def check(route: str, program: Program, several: list[Batch]) -> None:
    """Judge the calls of one program, and that the route served them and compiled no more than it must."""
    score_mod, make_mask = score_mod_of(program.score), mask_mod_of(program.mask)
    cached = program.keys_in != "packed"

    def call(scale, shift, q, k, v, captures, sequences, mask):
        mod = None if program.score is None else score_mod(shift)(*captures)
        out, aux = varlen_attention(q, k, v, sequences, mod, mask, scale, enable_gqa=True, return_aux=ALL)
        return out.transpose(0, 1)[None], aux.lse[None], aux.max_scores[None]

    attend = compiled(route, call)
    with compilations(route) as shapes:
        for batch in several:
            generator = torch.Generator().manual_seed(batch.seed)
            longest = max(map(max, batch.lengths))
            sizes = Sizes(len(batch.lengths), program.heads, queries=longest, keys=longest)
            captures = [capture(name, sizes, generator) for name in named_in(program.score)]
            mask_mod = make_mask(sizes, generator)
            places = _places(program, batch, generator)
            mask = places.sequences.mask(mask_mod, heads=program.heads, block_size=program.block)
            inputs = _tensors(program, batch, generator)
            shapes.add(_shapes_to_torch(inputs, captures, places.sequences, mask))

            def ours(q, k, v, captures, _, batch=batch, places=places, mask=mask):
                q = q.squeeze(0).transpose(0, 1)
                if cached:
                    k, v = (_in_cache(t, places) for t in (k, v))
                else:
                    k, v = (t.squeeze(0).transpose(0, 1) for t in (k, v))
                return attend(batch.scale, batch.shift, q, k, v, captures, places.sequences, mask)

            judge(
                ours,
                _alone(program, batch, score_mod(batch.shift), mask_mod),
                inputs,
                captures,
                constant=("d_key", "d_value") if cached else (),
                by_ratio=False,
            )
