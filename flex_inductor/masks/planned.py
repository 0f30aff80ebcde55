"""Masks that say themselves how attention is called with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Wants(NamedTuple):
    """What a call returns beside its output."""

    lse: bool
    max_scores: bool


class PlannedMask:
    """Planned for queries, keys and values of which each process has a part: see flex_inductor/distributed/."""

    choice: Any = None  # of the method by which it was planned: a MethodChoice

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise where the mask was planned for other tensors."""
        raise NotImplementedError

    def local(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any, Callable[[Any], Any], int]:
        """What this process has of them, a function that gives results the type of query, and the first head."""
        raise NotImplementedError

    def lifted(self, score_mod: Any, query: Any, local_query: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """score_mod, and what it captures as this process computes with it; nothing where it is traced later."""
        return score_mod, ()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, call: Callable[..., Any], wants: Wants, head: int
    ) -> Any:
        """(out, logsumexp, max_scores), by `call(query, key, value, mask_mod, inputs)` on what this process has.

        Mods see `head` as the first one.
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
