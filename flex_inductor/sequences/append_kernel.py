"""The kernel of append_kv: an instance for each new token, and for each query to rotate.

    k_cache, v_cache  [rows, length, heads, D] and [..., V], or pages of a pool
    k, v, q, turned   [tokens, heads, D or V], contiguous in the last dimension; `turned` is q rotated, and contiguous
    cos, sin          [positions, R], contiguous; the first 2 R of a head's dimensions are rotated

Tensors of float8_e4m3fn are passed as uint8: sm_80 and sm_86 do not have the format.

The other tensors, contiguous but for the page table, have an entry for each sequence, and offsets one more. Nothing
that they hold leads to a place outside of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sequence_of(starts, token, sequences):
    """The first sequence that ends after the token; `sequences` if none does."""
    low = token * 0
    high = low + sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def length_of(starts, counts, sequence):
    length = tl.load(starts + sequence + 1).to(tl.int64) - tl.load(starts + sequence)
    if counts is not None:
        length = tl.minimum(length, tl.load(counts + sequence))
    return tl.maximum(length, 0)


@triton.jit
def loaded(x, head_stride, head, d, inside):
    return tl.load(x + head * head_stride + d, mask=inside, other=0.0)


@triton.jit
def of_e4m3(x):
    """As fp32. Exponent and mantissa move to where fp16 has them, and the factor makes up for its other bias."""
    magnitude = (x & 0x7F).to(tl.uint16)
    half = (((x & 0x80).to(tl.uint16) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def to_e4m3(x):
    """From fp32, rounded to even; beyond the largest number is the largest, as on cards that convert."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half of the last place, or just less where that would round to odd, carries into what stays.
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # The last place of 2^14 is the one of numbers below 2^-6.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    found = tl.where(magnitude < (121 << 23), small, tl.minimum(normal, 0x7E))
    found = tl.where(magnitude > 0x7F800000, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rotated(
    x,
    head_stride,
    head,
    d,
    inside,
    cos,
    sin,
    position,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    E4M3: tl.constexpr,
):
    if INTERLEAVED:
        pair, first, other = d // 2, d % 2 == 0, d ^ 1
    else:
        pair, first, other = d % R, d < R, tl.where(d < R, d + R, d - R)
    turns = inside & (d < 2 * R)
    here = loaded(x, head_stride, head, d, inside)
    partner = loaded(x, head_stride, head, other, turns)
    if E4M3:
        here, partner = of_e4m3(here), of_e4m3(partner)
    else:
        here, partner = here.to(WIDE), partner.to(WIDE)
    c = tl.load(cos + position * R + pair, mask=turns, other=1.0).to(WIDE)
    s = tl.load(sin + position * R + pair, mask=turns, other=0.0).to(WIDE)
    found = here * c + tl.where(first, -partner, partner) * s
    return to_e4m3(found) if E4M3 else found


@triton.jit(do_not_specialize=["sequences", "tokens", "room", "cache_rows", "positions", "pages_sequence"])
def append(
    k_cache, v_cache, k, v, q, turned, cos, sin, starts, q_starts, counts, ends, pads, rows, pages,
    sequences, tokens, room, cache_rows, positions,
    k_row, k_place, k_head, k_dim, v_row, v_place, v_head, v_dim,
    k_new_token, k_new_head, v_new_token, v_new_head, q_token, q_head, pages_sequence, pages_place,
    HEADS: tl.constexpr, Q_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    HEADS_PAD: tl.constexpr, Q_HEADS_PAD: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, Q_MOVES: tl.constexpr,
    WIDE: tl.constexpr, Q_WIDE: tl.constexpr, E4M3: tl.constexpr, Q_E4M3: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, D_PAD)[None, :].to(tl.int64)
    if program < tokens:
        token = program
        found = sequence_of(starts, token, sequences)
        sequence = tl.minimum(found, sequences - 1)
        length = length_of(starts, counts, sequence)
        within = token - tl.load(starts + sequence).to(tl.int64)
        position = tl.load(ends + sequence) - length + within
        least = position * 0
        if pads is not None:
            least = tl.maximum(least, tl.load(pads + sequence))
        there = (found < sequences) & (within >= 0) & (within < length)
        there = there & (position >= least) & (position < room)
        position = tl.minimum(tl.maximum(position, 0), room - 1)
        if pages is not None:
            entry = pages + sequence.to(tl.int64) * pages_sequence + position // PAGE * pages_place
            row, place = tl.load(entry).to(tl.int64), position % PAGE
        elif rows is not None:
            row, place = tl.load(rows + sequence).to(tl.int64), position
        else:
            row, place = sequence.to(tl.int64), position
        there = there & (row >= 0) & (row < cache_rows)
        head = tl.arange(0, HEADS_PAD)[:, None].to(tl.int64)
        inside = (head < HEADS) & (d < D) & there
        from_k = k + token.to(tl.int64) * k_new_token
        if R > 0:
            turn = tl.minimum(position, positions - 1)
            new = rotated(from_k, k_new_head, head, d, inside, cos, sin, turn, R, INTERLEAVED, WIDE, E4M3)
        else:
            new = loaded(from_k, k_new_head, head, d, inside)
        at_k = k_cache + row * k_row + place * k_place + head * k_head + d * k_dim
        tl.store(at_k, new.to(k_cache.dtype.element_ty), mask=inside)
        dv = tl.arange(0, V_PAD)[None, :].to(tl.int64)
        inside_v = (head < HEADS) & (dv < V) & there
        new_v = loaded(v + token.to(tl.int64) * v_new_token, v_new_head, head, dv, inside_v)
        tl.store(v_cache + row * v_row + place * v_place + head * v_head + dv * v_dim, new_v, mask=inside_v)
    elif q is not None:
        token = program - tokens
        sequence = tl.minimum(sequence_of(q_starts, token, sequences), sequences - 1)
        position = tl.load(ends + sequence) - length_of(starts, counts, sequence)
        if Q_MOVES:
            position += token - tl.load(q_starts + sequence)
        position = tl.minimum(tl.maximum(position, 0), positions - 1)
        head_q = tl.arange(0, Q_HEADS_PAD)[:, None].to(tl.int64)
        inside_q = (head_q < Q_HEADS) & (d < D)
        from_q = q + token.to(tl.int64) * q_token
        new_q = rotated(
            from_q, q_head, head_q, d, inside_q, cos, sin, position, R, INTERLEAVED, Q_WIDE, Q_E4M3
        )
        at_q = turned + token.to(tl.int64) * (Q_HEADS * D) + head_q * D + d
        tl.store(at_q, new_q.to(turned.dtype.element_ty), mask=inside_q)


def launch(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    starts: Tensor,
    q_starts: Tensor | None,
    counts: Tensor | None,
    ends: Tensor,
    pads: Tensor | None,
    rows: Tensor | None,
    pages: Tensor | None,
    interleaved: bool,
    q_moves: bool,
) -> Tensor:
    """As the op append_kv."""
    k, v = _lies_close(k), _lies_close(v)
    q, cos, sin = (None if x is None else _lies_close(x) for x in (q, cos, sin))
    if cos is not None and sin is not None and cos.dtype.itemsize == 1:
        cos, sin = cos.float(), sin.float()
    turned = k.new_empty(0) if q is None else q.new_empty(q.shape)
    sequences, (tokens, heads, d), length = starts.numel() - 1, k.shape, k_cache.size(1)
    room = length if pages is None else length * pages.size(1)
    if 0 in (room, k_cache.size(0)):
        tokens = 0  # there is no place for any
    programs = tokens + (0 if q is None else q.size(0))
    if programs and sequences:
        arguments = (
            *(None if x is None else _in_bits(x) for x in (k_cache, v_cache, k, v, q, turned)),
            *(cos, sin),
            *(starts, starts if q_starts is None else q_starts, counts, ends, pads, rows, pages),
            *(sequences, tokens, room, k_cache.size(0)),
            0 if cos is None else cos.size(0),
            *k_cache.stride(),
            *v_cache.stride(),
            *k.stride()[:2],
            *v.stride()[:2],
            *((0, 0) if q is None else q.stride()[:2]),
            *((0, 0) if pages is None else pages.stride()),
        )
        q_heads, width = 1 if q is None else q.size(1), v.size(2)
        padded = {
            f"{name}_PAD": triton.next_power_of_2(n)
            for name, n in {"HEADS": heads, "Q_HEADS": q_heads, "D": d, "V": width}.items()
        }
        with torch.cuda.device_of(k_cache):  # Triton launches on the current device
            append[(programs,)](
                *arguments,
                HEADS=heads,
                Q_HEADS=q_heads,
                D=d,
                V=width,
                R=0 if cos is None else cos.size(1),
                PAGE=length,
                INTERLEAVED=interleaved,
                Q_MOVES=q_moves,
                WIDE=_wide(k),
                Q_WIDE=_wide(k if q is None else q),
                E4M3=k.dtype == torch.float8_e4m3fn,
                Q_E4M3=q is not None and q.dtype == torch.float8_e4m3fn,
                **padded,
            )
    elif q is not None:
        turned.copy_(q)
    return turned


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _in_bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _lies_close(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and (x.dim() == 3 or x.is_contiguous()) else x.contiguous()
