"""flash_attn_combine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flex_inductor import flash

from . import judge
from .dense import Meaning
from .numbers import Numbers
from .suite import Case
from .work import Work, dtype_of

BATCH, HEADS = 3, 4


def attend(group: Case) -> Callable:
    dtype = getattr(torch, group["dtype"])
    return lambda out, lse: flash.flash_attn_combine(out, lse, out_dtype=dtype)


def work(case: Case, numbers: Numbers) -> Work:
    parts, length, d = case["num_splits"], case["seqlen"], case["d"]
    # Neither is contiguous, and the first batch has no keys in half of the parts.
    out = numbers.normal(parts, BATCH, HEADS, length, d).transpose(2, 3)
    lse = numbers.normal(parts, BATCH, 2 * HEADS, length).transpose(2, 3)[..., :HEADS]
    lse[parts // 2 :, : BATCH // 3] = -torch.inf
    if parts == 1:
        lse[:] = lse.nan_to_num(0.0, neginf=0.0)
    dtype = dtype_of(case)

    def problems(found):
        wide = lse.double()
        weights = wide.softmax(0)
        right = (out.double() * weights.unsqueeze(-1)).sum(0)
        named = {
            "out": (found[0], right, right.to(dtype)),
            "lse": (found[1], wide.logsumexp(0), wide.logsumexp(0)),
        }
        wrong = (judge.wrong(name, *tensors, unit=1.0) for name, tensors in named.items())
        return [problem for problem in wrong if problem]

    return Work((out, lse), [], [], [], Meaning(1.0), dtype, lambda outputs, grads: [], problems=problems)
