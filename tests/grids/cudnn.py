"""flex_attention, for a case that is drawn from cuDNN's choices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from . import flex
from .numbers import Numbers
from .suite import Case, hashed
from .work import Work

# Its dimensions are random numbers of eights, and its batches and heads many: these are the most that are taken here.
MOST_BATCHES, MOST_HEADS = 4, 8


def attend(group: Case) -> Callable:
    return flex.attend(drawn(group))


def work(case: Case, numbers: Numbers) -> Work:
    return flex.work(drawn(case), numbers)


def drawn(case: Case) -> Case:
    """The case, in the words of `flex`."""
    draws = random.Random(hashed("cudnn", case["test_no"], *(f"{k}={v}" for k, v in case.items())))

    def chosen(name: str, default: Any = False) -> Any:
        weights = case.get(name)
        return draws.choices(list(weights), list(weights.values()))[0] if weights else default

    def likely(name: str, otherwise: Callable[[], Any]) -> Any:
        values = case.get(name)
        return draws.choice(values) if values and draws.random() < 0.5 else otherwise()

    def eights(name: str) -> int:
        return 8 * draws.randint(1, case[name][1] // 8)

    def dims() -> tuple[int, int]:
        d, v = eights("d_qk"), eights("d_v")
        v = d if chosen("dims") == "d_qk=d_v" else v
        return max(d, v), v

    batch = min(MOST_BATCHES, likely("likely_batches", lambda: draws.randint(*case["batches"])))
    d, v = likely("likely_dims", dims)
    n, kind = draws.randint(*case["s_kv"]), chosen("lengths")
    m = {"s_q=1": 1, "s_q=s_kv": n}.get(kind) or min(n, draws.randint(*case["s_q"]))
    heads = min(MOST_HEADS, draws.randint(*case["heads"]))
    which = draws.choices(("mha", "gqa", "mqa"), case["head_groups"])[0]
    groups = {"mha": 1, "mqa": heads}.get(which) or draws.choice(
        [g for g in range(1, heads + 1) if heads % g == 0]
    )
    alignment, layout, masks = chosen("alignment"), chosen("layout"), chosen("masks")
    lengths_q, lengths_k = [m] * batch, [n] * batch
    if layout != "full":
        lengths_q = [0 if draws.random() < 0.1 else draws.randint(1, m) for _ in range(batch)]
        lengths_k = [draws.randint(1, n) for _ in range(batch)]
    any_number = m + n
    half = max(1, n // 2)
    left, right = {
        "no_mask": lambda: (any_number, any_number),
        "causal": lambda: (any_number, 0),
        "left_window_only": lambda: (draws.randint(1, half), 0),
        "right_window_only": lambda: (
            any_number if alignment == "bottom_right" else 1,
            draws.randint(0, n // 2),
        ),
        "band_around_diag": lambda: (draws.randint(1, half), draws.randint(1, half)),
    }[masks]()
    shifts = [k - q if alignment == "bottom_right" else 0 for q, k in zip(lengths_q, lengths_k, strict=True)]
    mod = "bias" if chosen("bias") else "alibi" if chosen("alibi") else "identity"
    made: Case = {
        "dtype": chosen("dtypes"), "seqlen_q": m, "seqlen_k": n, "d": d, "value_dim": v, "batch": batch, "nheads_kv": heads // groups,
        "gqa_ratio": groups, "score_mod": mod, "has_learnable_sink": chosen("sinks"), "grad": case["grad"],
        "dropout_p": 0.1 if chosen("dropout") else 0.0, "layout": "bshd" if layout == "ragged" else "bhsd",
    }  # fmt: skip
    if chosen("tiles"):
        return made | {"mask": "tiles"}
    if layout != "full" or masks != "no_mask":
        made |= {"mask": "band", "band": (lengths_q, lengths_k, shifts, left, right)}
    return made
