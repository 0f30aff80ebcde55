"""flash_attn_varlen_func and its packed forms, with keys in pages too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flex_inductor import flash

from . import padded
from .dense import Sequence
from .numbers import Numbers
from .suite import Case
from .work import (
    NotThere,
    Work,
    dtype_of,
    heads_of,
    lengths_of,
    magnitudes_of,
    meaning_of,
    state_tensors,
    window_of,
)


def attend(group: Case) -> Callable:
    if group.get("has_qv"):
        raise NotThere("qv: FlashAttention's functions have no such argument here")
    packing = padded.packing_of(group)
    function = {
        "": flash.flash_attn_varlen_func, "kv": flash.flash_attn_varlen_kvpacked_func,
        "qkv": flash.flash_attn_varlen_qkvpacked_func,
    }[packing]  # fmt: skip
    constants = {
        "dropout_p": group.get("dropout_p", 0.0), "causal": group.get("causal", False),
        "softcap": group.get("softcap", 0.0), "num_splits": group.get("num_splits", 0),
        "softmax_scale": group.get("softmax_scale"), "return_attn_probs": not group.get("dropout_p"),  # with dropout it makes the weights too, one by one
    }  # fmt: skip

    def call(
        tensors, cu_q, cu_k, most_q, most_k, used_q, used_k, table, window, chunk, slopes, state, descales
    ):
        lengths = (cu_q, most_q) if packing == "qkv" else (cu_q, cu_k, most_q, most_k)
        more = {}
        if descales is not None:
            more |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        if state is not None:
            more["rng_state"] = state
        if chunk is not None:
            more["attention_chunk"] = chunk
        if used_q is not None:
            more["seqused_q"] = used_q
        if used_k is not None:
            more["seqused_k"] = used_k
        if table is not None:
            more["block_table"] = table
        found = function(*tensors, *lengths, window_size=window, alibi_slopes=slopes, **constants, **more)
        return found[:2] if constants["return_attn_probs"] else (found,)

    return call


def lengths(case: Case, numbers: Numbers, longest: int, side: str, sequences: int) -> list[int]:
    """As FlashAttention's tests draw them."""
    if f"lengths_{side}" in case:
        return list(case[f"lengths_{side}"])
    least = {"full": longest, "third": max(1, longest // 3)}.get(
        case.get("varlen_mode"), max(1, longest - 20)
    )
    drawn = [numbers.below(longest + 1, least) for _ in range(sequences)]
    if case.get(f"zero_lengths_{side}"):
        drawn[0] = drawn[-1] = 0
    return drawn


def offsets(rooms: list[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(rooms).cumsum(0), (1, 0)).int()


def work(case: Case, numbers: Numbers) -> Work:
    heads, kv_heads = heads_of(case)
    dtype, d = dtype_of(case), case["d"]
    if "B" in case:
        count, low, high = case["B"], case["min_seq_len"], case["max_seq_len"]
        # The test's own batch of 20 sequences of 2048 would take a minute: there are as many, and shorter ones.
        high = max(low, min(high, 8192 // count))
        used_q = [numbers.below(high + 1, low) for _ in range(count)]
        used_k = [numbers.below(high + 1, low) for _ in range(count)]
        m, n = high, high
    else:
        m, n = lengths_of(case) if "lengths_q" not in case else (256, 3)
        count = 3
        used_q = lengths(case, numbers, m, "q", count)
        used_k = lengths(case, numbers, n, "k", count)
    packing = padded.packing_of(case)
    whole = case.get("same_lengths") and (case.get("causal") or case.get("local_enum"))
    if whole or packing == "qkv":
        used_k, n = used_q, m
    rooms_q, rooms_k = list(used_q), list(used_k)
    if case.get("add_unused_qkv"):
        rooms_q = [max(u, r) for u, r in zip(used_q, lengths(case, numbers, m, "", count), strict=True)]
        rooms_k = [max(u, r) for u, r in zip(used_k, lengths(case, numbers, n, "", count), strict=True)]
    given_q, given_k = rooms_q != used_q, rooms_k != used_k
    if not case.get("unpad_q", True):
        rooms_q, given_q = [m] * count, True
    if not case.get("unpad_kv", True):
        rooms_k, given_k = [n] * count, True
    given_q, given_k = (given or case.get("add_unused_qkv", False) for given in (given_q, given_k))
    cu_q, cu_k = offsets(rooms_q), offsets(rooms_k)
    narrow = dtype.itemsize == 1
    size = case.get("page_size")
    sizes = zip(
        (sum(rooms_q), sum(rooms_k), sum(rooms_k)), (heads, kv_heads, kv_heads),
        (d, d, case.get("value_dim", d)), strict=True,
    )  # fmt: skip
    q, k, v = (
        numbers.normal(total, h, dim, dtype=torch.bfloat16 if narrow else dtype, magnitude=magnitude)
        for (total, h, dim), magnitude in zip(sizes, magnitudes_of(case), strict=True)
    )
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for start, used, room in zip(starts_k, used_k, rooms_k, strict=False):
        for t in (k, v):
            t[start + used : start + room] = torch.nan  # what no sequence has must not matter
    q, k, v = (t.to(dtype) for t in (q, k, v))
    window = window_of(case, numbers, n)
    chunk = numbers.below(2 * n, 1) if case.get("chunked") and window == (None, None) else 0
    slopes = numbers.uniform(count, heads, most=0.3) if case.get("alibi") else None
    grad = case["grad"] and not narrow and size is None
    tensors = padded.packed(packing, q, k, v, 1)
    table = None
    if size is not None:
        k_pages, v_pages, table = in_pages([k, v], starts_k, used_k, size, numbers)
        tensors = (q, k_pages, v_pages)
    leaves = [t.requires_grad_() for t in tensors] if grad else []
    descales, wide = None, (q, k, v)
    if narrow:
        descales = tuple(numbers.uniform(count, kv_heads, most=2.0) for _ in range(3))
    result = torch.bfloat16 if narrow else dtype
    up = numbers.normal(q.size(0), heads, v.size(-1), dtype=result) if grad else None
    q, k, v = (t.detach() for t in wide)
    sequences = []
    for i in range(count):
        rows = slice(starts_q[i], starts_q[i] + used_q[i])
        keys = slice(starts_k[i], starts_k[i] + used_k[i])
        own = q[rows], k[keys], v[keys]
        if narrow:
            found = padded.rescaled(*(t[None] for t in own), [scale[i : i + 1] for scale in descales])
            own = tuple(t[0] for t in found)
        up_here = None if up is None else up[rows]
        sequences.append(Sequence(i, *own, None if slopes is None else slopes[i], up_here))
    if up is not None and given_q:  # rows of no sequence have nothing to say
        of_none = torch.ones(up.size(0), dtype=torch.bool)
        for i in range(count):
            of_none[starts_q[i] : starts_q[i] + used_q[i]] = False
        up.masked_fill_(of_none.view(-1, 1, 1), 0.0)
    scale = case.get("softmax_scale") or d**-0.5
    meaning = meaning_of(case, scale, window, chunk, None)._replace(places_are_aligned=True)
    args = (
        tensors, cu_q, cu_k, m, n, torch.tensor(used_q).int() if given_q else None,
        torch.tensor(used_k).int() if given_k else None, table,
        tuple(-1 if side is None else side for side in window), chunk or None, slopes,
        state_tensors() if case.get("dropout_p") else None, descales,
    )  # fmt: skip

    def parts(outputs, grads):
        of_tensors = padded.unpacked(packing, grads, 1) if grads else ()
        found = []
        for i in range(count):
            rows = slice(starts_q[i], starts_q[i] + used_q[i])
            keys = slice(starts_k[i], starts_k[i] + used_k[i])
            found.append({"out": outputs[0][rows].transpose(0, 1)})
            if len(outputs) > 1:
                found[-1]["lse"] = outputs[1][:, rows]
            for name, t, where in zip(
                ("d_query", "d_key", "d_value"), of_tensors, (rows, keys, keys), strict=False
            ):
                found[-1][name] = t[where].transpose(0, 1)
        return found

    twice = case.get("twice", False)
    return Work(args, leaves, [up], sequences, meaning, result, parts, None, twice)


def in_pages(tensors: list[Tensor], starts: list[int], used: list[int], size: int, numbers: Numbers) -> tuple:
    """The tokens of each sequence in pages of `size`, in any order, and the table; NaN wherever none is."""
    width = max(1, -(-max(used) // size))
    pages = list(range(len(used) * width + 1))
    numbers.whole.shuffle(pages)
    table = torch.tensor(pages[: len(used) * width]).view(len(used), width)
    made = []
    for t in tensors:
        pool = torch.full((len(pages), size, *t.shape[1:]), torch.nan, dtype=t.dtype)
        flat = pool.flatten(0, 1)
        for i, count in enumerate(used):
            place = torch.arange(count)
            flat[table[i][place // size] * size + place % size] = t[starts[i] : starts[i] + count]
        made.append(pool)
    return (*made, table.int())
