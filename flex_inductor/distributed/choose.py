"""Which method serves a layout best, by the model, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost import CostModel, amount
from .simulate import Estimate, estimate, refusal
from .work import TileWork

ORDER = ("all_gather", "cast", "ulysses", "ring")
CLOSE = 1.05


class MethodChoice(NamedTuple):
    """A method, and why; the others with the reason against each: what a decision says."""

    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]


def choose_method(
    work: TileWork,
    owner: Sequence[int],
    ranks: int,
    model: CostModel | None = None,
    memory: float | None = None,
) -> MethodChoice:
    """Of all_gather, cast, ulysses and, where those need too much, ring. `memory` is what a call may hold, in bytes.

    It is the simplest of those that are nearly as fast as the fastest, in the order above. Without a `model` default
    sizes are taken, and ulysses is left out.
    """
    known, model = model is not None, CostModel() if model is None else model
    found: dict[str, Estimate] = {}
    rejected: dict[str, str] = {}
    for method in ORDER:
        reason = refusal(method, ranks, model)
        if method == "ulysses" and not known:
            reason = "it is for heads that divide by the ranks, and how many heads there are was not said"
        if method == "ring" and found:
            reason = "it is for calls whose keys and values do not fit in memory"
        if reason is None:
            made = estimate(work, owner, ranks, method, model)
            if memory is None or made.memory <= memory or method == "ring":
                found[method] = made
                continue
            reason = f"a call would hold {amount(made.memory)}, of {amount(memory)} there may be"
        rejected[method] = reason
    least = min(made.seconds for made in found.values())
    chosen = next(method for method, made in found.items() if made.seconds <= CLOSE * least)
    rejected |= {method: _facts(made) for method, made in found.items() if method != chosen}
    others = tuple((method, rejected[method]) for method in ORDER if method in rejected)
    return MethodChoice(chosen, _facts(found[chosen]), others)


def _facts(made: Estimate) -> str:
    return (
        f"by the model {1e3 * made.seconds:.3g} ms forward and backward, {amount(made.forward.bytes)} and "
        f"{amount(made.backward.bytes)} moved, {amount(made.memory)} held"
    )
