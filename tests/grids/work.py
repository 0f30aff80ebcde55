"""What a door makes of a case, and how the result is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import judge
from .dense import INF, Meaning, Sequence, dense
from .numbers import Numbers
from .suite import Case

# Beyond so many scores only one sequence and one head of keys is compared with dense attention, drawn by the case.
MOST_SCORES = 2**21
HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}
STATE = (77, 5)
GRADIENTS = ("d_query", "d_key", "d_value")


class NotThere(Exception):
    """The door has no such thing: what it lacks."""


class Work(NamedTuple):
    """One call. `parts` gives what was found for each sequence, by the names of `dense`, heads first."""

    args: tuple
    leaves: list[Tensor]
    upstream: list[Tensor]  # of the outputs, which begin with out and lse
    sequences: list[Sequence]
    meaning: Meaning
    dtype: torch.dtype
    parts: Callable[[Any, list[Tensor]], list[dict[str, Tensor]]]
    d_sinks: Callable[[list[Tensor]], Tensor] | None = None
    twice: bool = False  # whether bits must be the same again
    problems: Callable[[Any], list[str]] = lambda outputs: []
    allowed: judge.Allowed = judge.Allowed()


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case["dtype"])


def heads_of(case: Case) -> tuple[int, int]:
    if "gqa_ratio" in case:
        return case["nheads_kv"] * case["gqa_ratio"], case["nheads_kv"]
    if "H" in case:  # FlashAttention 4's test has that many heads of keys, grouped by 3 if at all
        heads = case["H"]
        return {"mha": (heads, heads), "gqa": (3 * heads, heads), "mqa": (heads, 1)}[case["mha_type"]]
    return HEADS[case.get("mha_type", "mha")]


def lengths_of(case: Case) -> tuple[int, int]:
    m, n = case.get("seqlen_q", case.get("seqlen")), case.get("seqlen_k", case.get("seqlen"))
    return (n, m) if case.get("swap_sq_sk") else (m, n)


def magnitudes_of(case: Case) -> tuple[float, float, float]:
    """What queries, keys and values are multiplied with. Queries reach the softcap's range."""
    if case.get("softcap"):
        return case["softcap"] / (4 if case.get("quarter") else 1), 1.0, 1.0
    return case.get("magnitudes", (1.0, 1.0, 1.0))


def window_of(case: Case, numbers: Numbers, keys: int) -> tuple[int | None, int | None]:
    """As the test draws it, None for any; with `negative` that of one side may be."""
    which = case.get("local_enum", int(case.get("local", False)))
    if not which:
        return None, None
    left, right = numbers.below(keys), numbers.below(keys)
    sign = -1 if case.get("negative") else 1
    return ((left, right), (None, sign * right), (sign * left, None))[which - 1]


def meaning_of(case: Case, scale: float, window: tuple, chunk: int, sinks: Tensor | None) -> Meaning:
    left, right = (INF if side is None else side for side in window)
    return Meaning(
        scale, case.get("softcap", 0.0), left, min(right, 0) if case.get("causal") else right, chunk,
        case.get("dropout_p", 0.0), STATE, sinks=sinks,
    )  # fmt: skip


def state_tensors() -> tuple[Tensor, Tensor]:
    return torch.tensor(STATE[0]), torch.tensor(STATE[1])


def check(attend: Callable, work: Work, numbers: Numbers) -> list[str]:
    """What is wrong with a call, in words."""
    outputs, grads = _run(attend, work)
    found = work.parts(outputs, grads)
    wrong = work.problems(outputs)
    if work.twice:
        again = _run(attend, work)
        pairs = zip((*outputs[:2], *grads), (*again[0][:2], *again[1]), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            wrong.append("bits differ from run to run")
    units = [
        (i, head) for i, s in enumerate(work.sequences) if s.query.size(0) for head in range(s.key.size(1))
    ]
    sizes = (s.query.size(0) * s.query.size(1) * s.key.size(0) for s in work.sequences)
    whole = sum(sizes) <= MOST_SCORES
    heads_in_all = work.sequences[0].query.size(1) if units else 0
    d_sinks, noise = torch.zeros(2, heads_in_all), torch.zeros(heads_in_all)
    for i, head in units if whole else [units[numbers.below(len(units))]]:
        sequence = work.sequences[i]
        right, rounded = dense(sequence, work.meaning, head, work.dtype)
        group = sequence.query.size(1) // sequence.key.size(1)
        heads = slice(head * group, (head + 1) * group)
        unit = right["d_value"].abs().max().item() if "d_value" in right and right["d_value"].numel() else 1.0
        if "d_sinks" in right:
            d_sinks[0, heads] += right.pop("d_sinks")
            d_sinks[1, heads] += rounded["d_sinks"]
            noise[heads] += right.pop("noise_of_d_sinks").square()
        for name, gold in right.items():
            if name not in found[i]:
                continue
            got = found[i][name][head if name in ("d_key", "d_value") else heads]
            allowed, of_output = work.allowed, right.get(f"noise_of_{name}")
            if of_output is not None and of_output.numel():
                deviations = 2 * torch.finfo(work.dtype).eps * of_output.max().item()
                allowed = allowed._replace(more=allowed.more + deviations)
            problem = judge.wrong(name, got, gold, rounded[name], unit if name in GRADIENTS else 1.0, allowed)
            if problem:
                wrong.append(f"{problem}, of sequence {i} and head {head} of keys")
    if whole and work.d_sinks is not None:
        # Four deviations of what rounding the output does, beside what dense attention makes of it.
        more = 4 * torch.finfo(work.dtype).eps * noise.max().sqrt().item()
        problem = judge.wrong("d_sinks", work.d_sinks(grads), *d_sinks, 1.0, judge.Allowed(more=more))
        wrong += [problem] if problem else []
    if not all(t.isfinite().all() for t in (outputs[0], *grads)):
        wrong.append("not all of the output and the gradients is finite")
    return wrong


def _run(attend: Callable, work: Work) -> tuple[Any, list[Tensor]]:
    if not work.leaves:
        with torch.no_grad():
            return attend(*work.args), []
    outputs = attend(*work.args)
    given = outputs[: len(work.upstream)]
    return outputs, list(torch.autograd.grad(given, work.leaves, work.upstream))
