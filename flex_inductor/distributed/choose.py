"""Which method serves a layout best, by the model, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost import CostModel, amount
from .simulate import Estimate, estimate, refusal
from .work import TileWork

ORDER = ("all_gather", "cast", "ulysses", "ring_ulysses", "ring")
OF_HEADS = ("ulysses", "ring_ulysses")
CLOSE = 1.05


class MethodChoice(NamedTuple):
    """A method, and why; the others with the reason against each: what a decision says."""

    plan: str  # what it is for, in a line
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]


def choose_method(
    work: TileWork,
    owner: Sequence[int],
    ranks: int,
    model: CostModel | None = None,
    *,
    asked: str = "auto",
    node: int | None = None,
) -> MethodChoice:
    """The method that was `asked` for, or of all that can run the simplest that is nearly as fast as the fastest.

    `node` is how many ranks share heads, on a mesh of two dimensions: ring_ulysses is among the methods there. Ring is
    taken where the others need more than `model.memory`. Without a `model` default sizes are taken, and nobody knows
    how many heads there are to share.
    """
    known, model = model is not None, CostModel() if model is None else model
    able: dict[str, Estimate] = {}
    against: dict[str, str] = {}
    for method in ORDER if node else [method for method in ORDER if method != "ring_ulysses"]:
        reason = refusal(method, ranks, model, node)
        if reason is None:
            held = [rank // node for rank in owner] if node and method == "ring_ulysses" else owner
            made = estimate(work, held, ranks, method, model, node)
            if method == asked:
                able = {method: made}
            elif asked != "auto":
                reason = "not asked for"
            elif method in OF_HEADS and not known:
                reason = "it shares out heads, and how many there are was not said"
            elif method == "ring" and able:
                reason = "it is for calls whose keys and values do not fit in memory"
            elif method != "ring" and model.memory is not None and made.memory > model.memory:
                reason = f"a call may hold {amount(model.memory)}"
            else:
                able[method] = made
            reason = reason and f"{reason}; {_facts(made)}"
        if reason is not None:
            against[method] = reason
    if asked == "auto":
        least = min(made.seconds for made in able.values())
        chosen = next(method for method, made in able.items() if made.seconds <= CLOSE * least)
        why = _facts(able[chosen])
    else:
        chosen = asked
        why = "; ".join(["asked for", *map(_facts, able.values())])
        against.pop(asked, None)  # whether it can run is known once it is called
    against |= {method: _facts(made) for method, made in able.items() if method != chosen}
    others = tuple((method, against[method]) for method in ORDER if method in against)
    masks = f"{len(work.masks)} mask" + ("" if len(work.masks) == 1 else "s")
    plan = f"plan of {masks}, {work.length} tokens in {work.tiles} tiles of {work.tile}, {ranks} ranks"
    return MethodChoice(plan, chosen, why, others)


def _facts(made: Estimate) -> str:
    return (
        f"by the model {1e3 * made.seconds:.3g} ms forward and backward, {amount(made.forward.bytes)} and "
        f"{amount(made.backward.bytes)} moved, {amount(made.memory)} held"
    )
