"""flex_attention with a score_mod, a BlockMask, or both."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flex_inductor import AuxRequest, create_block_mask, flex_attention

from .dense import Meaning, Sequence
from .mods import MASKS, SCORES, Mod, Shape
from .numbers import Numbers
from .suite import Case
from .work import GRADIENTS, STATE, Work, dtype_of, heads_of, lengths_of, state_tensors

NOTHING = Mod(lambda: None)


def attend(group: Case) -> Callable:
    score = SCORES.get(group["score_mod"], NOTHING)
    dropout_p = group.get("dropout_p", 0.0)

    def call(q, k, v, captures, block_mask, sinks, state):
        out, aux = flex_attention(
            q, k, v, score.build(*captures), block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True),
            sinks=sinks, dropout_p=dropout_p, rng_state=state,
        )  # fmt: skip
        return out, aux.lse

    return call


def work(case: Case, numbers: Numbers) -> Work:
    (m, n), (heads, kv_heads), dtype = lengths_of(case), heads_of(case), dtype_of(case)
    batch, kv_batch = case.get("Bq", case.get("batch", 2)), case.get("Bkv")
    score, mask = SCORES.get(case["score_mod"], NOTHING), MASKS.get(case.get("mask", ""), NOTHING)
    shape = Shape(batch, heads, m, n)
    captures = score.captures(shape, numbers)
    if case.get("band") is not None:
        mask_captures = tuple(torch.tensor(numbers) for numbers in case["band"])
    else:
        mask_captures = mask.captures(shape, numbers)
    score_mod, mask_mod = score.build(*captures), mask.build(*mask_captures)
    block_mask = None
    if mask_mod is not None:
        of_batch = batch if case.get("band") is not None else None
        block_mask = create_block_mask(
            mask_mod, of_batch, None, m, n, device="cpu", BLOCK_SIZE=case.get("block", 128)
        )
    d, v_dim = case["d"], case.get("value_dim", case["d"])
    q = numbers.normal(batch, heads, m, d, dtype=dtype)
    k = numbers.normal(kv_batch or batch, kv_heads, n, d, dtype=dtype)
    v = numbers.normal(kv_batch or batch, kv_heads, n, v_dim, dtype=dtype)
    if case.get("layout") == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    sinks = numbers.normal(heads) if case.get("has_learnable_sink") else None
    grad = case["grad"]
    up = numbers.normal(batch, heads, m, v_dim, dtype=dtype) if grad else None
    leaves = [t.requires_grad_() for t in (q, k, v)] if grad else []
    if grad and sinks is not None:
        leaves.append(sinks.requires_grad_())
    state = state_tensors() if case.get("dropout_p") else None
    args = (q, k, v, captures, block_mask, sinks, state)
    rows = [t.detach().transpose(1, 2).expand(batch, -1, -1, -1) for t in (q, k, v)]
    sequences = [
        Sequence(b, *(t[b] for t in rows), upstream=None if up is None else up[b].transpose(0, 1))
        for b in range(batch)
    ]
    meaning = Meaning(
        d**-0.5, score_mod=score_mod, mask_mod=mask_mod, sinks=None if sinks is None else sinks.detach(),
        dropout_p=case.get("dropout_p", 0.0), rng_state=STATE,
    )  # fmt: skip

    def parts(outputs, grads):
        named = {"out": outputs[0], "lse": outputs[1]} | dict(zip(GRADIENTS, grads, strict=False))
        return [{name: t[b] for name, t in named.items()} for b in range(batch)]

    d_sinks = (lambda grads: grads[-1]) if grad and sinks is not None else None
    return Work(args, leaves, [up], sequences, meaning, dtype, parts, d_sinks, case.get("twice", False))
