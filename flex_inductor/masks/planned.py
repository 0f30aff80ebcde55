"""Masks that say themselves how attention is called with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Wants(NamedTuple):
    """What a call returns beside its output."""

    lse: bool
    max_scores: bool


class PlannedMask:
    """Planned for queries, keys and values of which each process has a part: see flex_inductor/distributed/."""

    choice: Any = None  # of the method by which it was planned: a MethodChoice

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any,
        checks: Callable[..., None],
        call: Callable[..., Any],
        wants: Wants,
    ) -> Any:
        """(out, logsumexp, max_scores) of what this process has.

        By `call(query, key, value, score_mod, mask_mod, inputs)`, once `checks(query, key, value)` has refused nothing.
        """
        raise NotImplementedError


class _Depth(threading.local):
    depth = 0


_entered = _Depth()


def enter() -> None:
    """From here on, calls of this thread need a planned mask."""
    _entered.depth += 1


def leave() -> None:
    _entered.depth -= 1


def needs_plan() -> bool:
    return _entered.depth > 0


# Dynamo takes what it says for a constant: who enters also changes the thread's modes, on which compiled code guards.
needs_plan._dynamo_marked_constant = True  # type: ignore[attr-defined]
