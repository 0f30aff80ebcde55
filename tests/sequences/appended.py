"""Calls of append_kv, and what they should leave in the cache: shared by its tests on CPU and in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flex_inductor import Sequences

HEADS, QUERY_HEADS, DIM, VALUE_DIM, LENGTH = 2, 4, 12, 5, 40
NEW, USED = [3, 1, 0, 6, 1], [10, 1, 7, 40, 33]  # the last of them are new


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Appended(NamedTuple):
    sequences: Sequences
    caches: list[Tensor]
    new: list[Tensor]  # q, k, v
    places: list[tuple[int, int, int]]  # of each new token: row, place there, position
    rotary: tuple[Tensor, Tensor]


def case(kind: str, dtype: torch.dtype = torch.float32, pairs: int = 3) -> Appended:
    """In "rows", in rows with "padding", or in pages of the size that `kind` is."""
    generator = torch.Generator().manual_seed(0)
    cu = torch.nn.functional.pad(int32(NEW).cumsum(0), (1, 0)).to(torch.int32)
    order = torch.randperm(7, generator=generator).tolist()
    if kind in ("rows", "padding"):
        pads, batches, length = [4, 0, 7, 11, 2], 7, LENGTH
        given = {} if kind == "rows" else {"left_pad_k": int32(pads), "cache_rows": int32(order[:5])}
        sequences = Sequences(cu, used_k=int32(USED), max_k=LENGTH, **given)

        def place(n, position):
            return (n if kind == "rows" else order[n]), position

        room = [0] * 5 if kind == "rows" else pads
    else:
        length, room = int(kind), [0] * 5
        width = -(-LENGTH // length)
        batches = 5 * width
        table = torch.randperm(batches, generator=generator).view(5, width)
        sequences = Sequences(cu, used_k=int32(USED), pages=int32(table.tolist()), page_size=length)

        def place(n, position):
            return int(table[n, position // length]), position % length

    places = []
    for n, (count, used, least) in enumerate(zip(NEW, USED, room, strict=True)):
        for position in range(used - count, used):
            assert position >= least
            places.append((*place(n, position), position))
    shapes = (
        (batches, length, HEADS, DIM),
        (batches, length, HEADS, VALUE_DIM),
        (sum(NEW) + 2, QUERY_HEADS, DIM),  # two tokens that belong to no sequence
        (sum(NEW) + 2, HEADS, DIM),
        (sum(NEW) + 2, HEADS, VALUE_DIM),
    )
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    angle = torch.randn(LENGTH * 2, pairs, generator=generator, dtype=torch.float64)
    return Appended(sequences, drawn[:2], drawn[2:], places, (angle.cos().to(dtype), angle.sin().to(dtype)))


def expected(given: Appended, rotary: bool, interleaved: bool) -> list[Tensor]:
    """Caches and rotated queries, token by token in fp64."""
    caches = [cache.double() for cache in given.caches]
    q, k, v = (x.double() for x in given.new)
    for token, (row, place, position) in enumerate(given.places):
        if rotary:
            q[token], k[token] = (turned(x[token], given.rotary, position, interleaved) for x in (q, k))
        caches[0][row, place], caches[1][row, place] = k[token], v[token]
    return [*caches, q[: sum(NEW)]]


def turned(x: Tensor, rotary: tuple[Tensor, Tensor], position: int, interleaved: bool) -> Tensor:
    """As complex numbers."""
    cos, sin = (table[position].double() for table in rotary)
    pairs = cos.numel()
    own, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    halves = own.unflatten(-1, (-1, 2)) if interleaved else own.unflatten(-1, (2, -1)).transpose(-1, -2)
    product = torch.view_as_complex(halves.contiguous()) * torch.complex(cos, sin)
    found = torch.view_as_real(product)
    found = found.flatten(-2) if interleaved else found.transpose(-1, -2).flatten(-2)
    return torch.cat([found, rest], -1)
