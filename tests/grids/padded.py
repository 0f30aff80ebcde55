"""flash_attn_func and its packed forms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flex_inductor import flash

from .dense import Sequence
from .judge import Allowed
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

BATCH = 2


def attend(group: Case) -> Callable:
    if group.get("has_qv"):
        raise NotThere("qv: FlashAttention's functions have no such argument here")
    packing = packing_of(group)
    function = {
        "": flash.flash_attn_func, "kv": flash.flash_attn_kvpacked_func, "qkv": flash.flash_attn_qkvpacked_func,
    }[packing]  # fmt: skip
    constants = {
        "dropout_p": group.get("dropout_p", 0.0), "causal": group.get("causal", False),
        "softcap": group.get("softcap", 0.0), "num_splits": group.get("num_splits", 0), "return_attn_probs": not group.get("dropout_p"),  # with dropout it makes the weights too, one by one
    }  # fmt: skip
    signed = group.get("negative") and group.get("local_enum", 0) > 1

    def call(tensors, window, chunk, slopes, sinks, state, descales, border):
        more = {}
        if signed:
            # A side that is negative here, where a negative one is any, as in FlashAttention 2.
            window, most, least = (-1, -1), border[0], border[1]
            more["mask_mod"] = lambda b, h, q_idx, kv_idx: (
                (kv_idx <= q_idx + most) & (kv_idx >= q_idx - least)
            )
        if descales is not None:
            more |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        if state is not None:
            more["rng_state"] = state
        if chunk is not None:
            more["attention_chunk"] = chunk
        found = function(*tensors, window_size=window, alibi_slopes=slopes, sinks=sinks, **constants, **more)
        return found[:2] if constants["return_attn_probs"] else (found,)

    return call


def packing_of(group: Case) -> str:
    return group.get("packing", "kv" if group.get("kvpacked") else "")


def packed(packing: str, q, k, v, dim: int) -> tuple:
    if packing == "qkv":
        return (torch.stack([q, k, v], dim),)
    return (q, torch.stack([k, v], dim)) if packing == "kv" else (q, k, v)


def unpacked(packing: str, tensors, dim: int) -> tuple:
    if packing == "qkv":
        return tensors[0].unbind(dim)
    return (tensors[0], *tensors[1].unbind(dim)) if packing == "kv" else tuple(tensors)


def work(case: Case, numbers: Numbers) -> Work:
    (m, n), (heads, kv_heads), dtype = lengths_of(case), heads_of(case), dtype_of(case)
    d = case["d"]
    narrow = dtype.itemsize == 1
    sizes = zip((m, n, n), (heads, kv_heads, kv_heads), (d, d, case.get("value_dim", d)), strict=True)
    q, k, v = (
        numbers.normal(BATCH, length, h, dim, dtype=torch.bfloat16 if narrow else dtype, magnitude=magnitude)
        for (length, h, dim), magnitude in zip(sizes, magnitudes_of(case), strict=True)
    )
    q, k, v = (t.to(dtype) for t in (q, k, v))
    window = window_of(case, numbers, n)
    chunk = numbers.below(2 * n, 1) if case.get("chunked") and window == (None, None) else 0
    slopes = numbers.uniform(BATCH, heads, most=0.3) if case.get("alibi") else None
    sinks = numbers.normal(heads) if case.get("has_learnable_sink") else None
    grad = case["grad"] and not narrow
    packing = packing_of(case)
    tensors = packed(packing, q, k, v, 2)
    leaves = [t.requires_grad_() for t in tensors] if grad else []
    if grad and sinks is not None:
        leaves.append(sinks.requires_grad_())
    descales, wide = None, (q, k, v)
    if narrow:
        descales = tuple(numbers.uniform(BATCH, kv_heads, most=2.0) for _ in range(3))
        wide = rescaled(q, k, v, descales)
    q, k, v = (t.detach() for t in wide)
    result = torch.bfloat16 if narrow else dtype
    up = up_lse = None
    if grad:
        shape = (BATCH, m, heads, v.size(-1))
        up = numbers.normal(*shape, dtype=result)
        if case.get("strided_upstream"):  # as that of out.transpose(0, 1), every second row of more
            up = numbers.normal(m, 2 * BATCH, *shape[2:], dtype=result)[:, ::2].transpose(0, 1)
        up_lse = numbers.normal(BATCH, heads, m) if case.get("lse_grad") else None
    scale = case.get("softmax_scale") or d**-0.5
    meaning = meaning_of(case, scale, window, chunk, None if sinks is None else sinks.detach())
    sequences = [
        Sequence(
            b, q[b], k[b], v[b], None if slopes is None else slopes[b], None if up is None else up[b],
            None if up_lse is None else up_lse[b],
        )
        for b in range(BATCH)
    ]  # fmt: skip
    given = tuple(-1 if side is None else side for side in window)
    border = tuple(torch.tensor(m + n if side is None else side) for side in reversed(window))
    state = state_tensors() if case.get("dropout_p") else None
    args = (tensors, given, chunk or None, slopes, sinks, state, descales, border)

    def parts(outputs, grads):
        of_tensors = unpacked(packing, grads, 2) if grads else ()
        found = []
        for b in range(BATCH):
            found.append({"out": outputs[0][b].transpose(0, 1)})
            if len(outputs) > 1:
                found[-1]["lse"] = outputs[1][b]
            for name, t in zip(("d_query", "d_key", "d_value"), of_tensors, strict=False):
                found[-1][name] = t[b].transpose(0, 1)
        return found

    return Work(
        args, leaves, [up] if up_lse is None else [up, up_lse], sequences, meaning, result, parts,
        (lambda grads: grads[-1]) if grad and sinks is not None else None, case.get("twice", False),
        allowed=Allowed(*case.get("allowed", ())),
    )  # fmt: skip


def rescaled(q, k, v, descales) -> tuple:
    """Numbers of 8 bits, multiplied by their descales; queries by those of keys too, and rounded, as in the call."""
    of_q, of_k, of_v = (scale.view(scale.size(0), 1, -1, 1) for scale in descales)
    groups = q.size(2) // k.size(2)
    both = (of_q * of_k).repeat_interleave(groups, 2)
    return (q.float() * both).bfloat16(), k.float(), v.float() * of_v
