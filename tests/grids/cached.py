"""flash_attn_with_kvcache: rows or pages, new keys, rotated or not, packed queries or padded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flex_inductor import flash

from . import packed, padded
from .dense import Sequence
from .numbers import Numbers
from .suite import Case
from .work import Work, dtype_of, heads_of, lengths_of, meaning_of, window_of

BATCH = 2


def attend(group: Case) -> Callable:
    constants = {
        "causal": group.get("causal", False),
        "num_splits": group["num_splits"],
        "return_softmax_lse": True,
    }

    def call(
        q, caches, new, rotary, interleaved, lengths, places, packing, window, chunk, slopes, sinks, descales
    ):
        more: dict[str, Any] = {"cache_seqlens": lengths}
        if new is not None:
            more |= {"k": new[0], "v": new[1]}
        if rotary is not None:
            more |= {"rotary_cos": rotary[0], "rotary_sin": rotary[1], "rotary_interleaved": interleaved}
        if packing is not None:
            more |= {"cu_seqlens_q": packing[0], "max_seqlen_q": packing[1], "cu_seqlens_k_new": packing[2]}
        if descales is not None:
            more |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        if chunk is not None:
            more["attention_chunk"] = chunk
        names = ("cache_batch_idx", "cache_leftpad", "block_table")
        more |= {name: t for name, t in zip(names, places, strict=True) if t is not None}
        # Appending writes in place, and a call is judged by the caches that it leaves.
        return flash.flash_attn_with_kvcache(
            q, *caches, window_size=window, alibi_slopes=slopes, sinks=sinks, **constants, **more
        )

    return call


def work(case: Case, numbers: Numbers) -> Work:
    (m, n), (heads, kv_heads), dtype = lengths_of(case), heads_of(case), dtype_of(case)
    d, size, count = (
        case.get("d", case.get("headdim")),
        case.get("page_size"),
        case.get("num_requests", BATCH),
    )
    narrow, new_kv, local = dtype.itemsize == 1, case.get("new_kv", False), case.get("local", False)
    made = torch.bfloat16 if narrow else dtype
    rotary_dim = int(case.get("rotary_fraction", 0.0) * d) // 16 * 16
    window = window_of(case, numbers, n)
    moves = case.get("causal", False) or window != (None, None)
    chunk = numbers.below(2 * n, 1) if case.get("chunked") else 0
    # How many of each there are.
    fresh = (m if case.get("seqlen_new_eq_seqlen_q", True) else numbers.below(m + 1, 1)) if new_kv else 0
    most = n - (m if (moves or local) and rotary_dim else fresh) if new_kv else n
    if case.get("cache_seqlen_rand", True):
        lengths = [numbers.below(max(most, 0) + 1, 0 if new_kv else 1) for _ in range(count)]
    else:
        lengths = [n] * count
    pads = [numbers.below(max(length, 1)) for length in lengths] if case.get("has_leftpad") else [0] * count
    varlen = case.get("varlen_q", False)
    queries = [numbers.below(m + 1, max(1, m - 20)) for _ in range(count)] if varlen else [m] * count
    fresh_each = [fresh] * count
    if varlen and fresh:
        fresh_each = [numbers.below(fresh + 1, max(1, fresh - 20)) for _ in range(count)]
    # Where they lie.
    rows_count = 2 * count if case.get("has_batch_idx") else count
    room = n if size is None else -(-n // size) * size
    caches = [numbers.normal(rows_count, room, kv_heads, d, dtype=made).to(dtype) for _ in range(2)]
    rows, table, given = list(range(count)), None, list(caches)
    if case.get("has_batch_idx"):
        rows = numbers.whole.sample(range(rows_count), count)
    if size is not None:
        table, given = pages_of(caches, size, numbers)
    q = numbers.normal(count, m, heads, d, dtype=made).to(dtype)
    new = (
        [numbers.normal(count, fresh, kv_heads, d, dtype=made).to(dtype) for _ in range(2)] if fresh else None
    )
    rotary = None
    if rotary_dim:
        angle = numbers.normal(room, rotary_dim // 2)
        rotary = (angle.cos().to(made), angle.sin().to(made))
    slopes = numbers.uniform(count, heads, most=0.3) if case.get("alibi") else None
    sinks = numbers.normal(heads) if case.get("has_learnable_sink") else None
    descales = tuple(numbers.uniform(count, kv_heads, most=2.0) for _ in range(3)) if narrow else None
    interleaved = case.get("rotary_interleaved", True)
    # What the call is to make of them.
    turned_q, turned_k = q, None if new is None else new[0]
    if rotary is not None and turned_k is not None:
        turned_q = rotated(q, rotary, lengths, interleaved, moves)
        turned_k = rotated(new[0], rotary, lengths, interleaved, True)
    expected = [cache.clone() for cache in caches]
    for i in range(count):
        place = slice(lengths[i], lengths[i] + fresh_each[i])
        for cache, tokens in zip(expected, (turned_k, None if new is None else new[1]), strict=True):
            if tokens is not None:
                cache[rows[i], place] = tokens[i, : fresh_each[i]]
    sequences = []
    for i in range(count):
        keys = slice(pads[i], lengths[i] + fresh_each[i])
        own = turned_q[i, : queries[i]], *(cache[rows[i], keys] for cache in expected)
        if narrow:
            wide = padded.rescaled(*(t[None] for t in own), [scale[i : i + 1] for scale in descales])
            own = tuple(t[0] for t in wide)
        sequences.append(Sequence(i, *own, None if slopes is None else slopes[i]))
    packing = None
    args_q, args_new = q, new
    if varlen:
        args_q = torch.cat([q[i, : queries[i]] for i in range(count)])
        if new is not None:
            args_new = [torch.cat([t[i, : fresh_each[i]] for i in range(count)]) for t in new]
        starts_new = packed.offsets(fresh_each) if fresh else None
        packing = (packed.offsets(queries), m, starts_new)
    places = (
        torch.tensor(rows).int() if case.get("has_batch_idx") else None,
        torch.tensor(pads).int() if case.get("has_leftpad") else None,
        table,
    )
    args = (
        args_q, given, args_new, rotary, interleaved, torch.tensor(lengths).int(), places, packing,
        tuple(-1 if side is None else side for side in window), chunk or None, slopes, sinks, descales,
    )  # fmt: skip
    result = torch.bfloat16 if narrow else dtype
    starts = packed.offsets(queries).tolist()

    def parts(outputs, grads):
        if not varlen:
            return [{"out": outputs[0][i].transpose(0, 1), "lse": outputs[1][i]} for i in range(count)]
        spans = [slice(a, b) for a, b in itertools.pairwise(starts)]
        return [{"out": outputs[0][s].transpose(0, 1), "lse": outputs[1][:, s]} for s in spans]

    def problems(outputs):
        if new is None:
            return []
        wrong = []
        for name, cache, want in zip(("k_cache", "v_cache"), given, expected, strict=True):
            found = cache if table is None else cache[table.long()].view(want.shape)
            differs = bits(found) != bits(want)  # whole caches in fp32 would take half of a case's time
            if not differs.any():
                continue
            off = (found[differs].float() - want[differs].float()).abs().max().item()
            allowed = 0.0
            if rotary is not None and name == "k_cache":  # two products and their sum are rounded
                allowed = 2 * torch.finfo(dtype).eps * want.float().abs().max().item()
            if not off <= allowed:
                wrong.append(f"{name}: differs by {off:.3g}, allowed {allowed:.3g}")
        return wrong

    meaning = meaning_of(case, d**-0.5, window, chunk, sinks)
    return Work(args, [], [], sequences, meaning, result, parts, problems=problems)


def bits(t: Tensor) -> Tensor:
    """To compare numbers of any dtype, those of 8 bits too."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def pages_of(caches: list[Tensor], size: int, numbers: Numbers) -> tuple[Tensor, list[Tensor]]:
    """The same tokens in pages, in any order."""
    count, width = caches[0].size(0), caches[0].size(1) // size
    order = list(range(count * width + 1))
    numbers.whole.shuffle(order)
    table = torch.tensor(order[: count * width])
    made = []
    for cache in caches:
        pool = torch.zeros(count * width + 1, size, *cache.shape[2:], dtype=cache.dtype)
        pool[table] = cache.view(count * width, size, *cache.shape[2:])
        made.append(pool)
    return table.view(count, width).int(), made  # a row for each of the cache: `cache_batch_idx` names some


def rotated(tokens: Tensor, rotary: tuple, starts: list[int], interleaved: bool, moves: bool) -> Tensor:
    """[B, M, H, D] turned to the positions from `starts` on, or all of a sequence to its first."""
    cos, sin = (t.float() for t in rotary)
    pairs = cos.size(1)
    made = tokens.float().clone()
    for i, start in enumerate(starts):
        place = start + (
            torch.arange(tokens.size(1)) if moves else torch.zeros(tokens.size(1), dtype=torch.long)
        )
        c, s = (t[place.clamp(max=t.size(0) - 1)].unsqueeze(1) for t in (cos, sin))
        first, second = (
            (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
            if interleaved
            else (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        a, b = made[i, ..., first].clone(), made[i, ..., second].clone()
        made[i, ..., first], made[i, ..., second] = a * c - b * s, a * s + b * c
    return made.to(tokens.dtype)
