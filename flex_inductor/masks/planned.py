"""Masks that decide themselves how attention is called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .. import compat


class PlannedMask:
    """A mask for queries, keys and values that are spread over processes: see flex_inductor/distributed/."""

    choice: Any = None  # its method: a MethodChoice

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any,
        checks: Callable[..., None],
        call: Callable[..., Any],
        wanted: Any,
        softmax: Any,
    ) -> Any:
        """Give (out, logsumexp, max_scores) for this process's part; the last two only if `wanted` asks for them.

        Run `checks(query, key, value)` first, then `call(query, key, value, score_mod, mask_mod, inputs)`.
        """
        raise NotImplementedError


class _Depth(threading.local):
    depth = 0


_entered = _Depth()


def enter() -> None:
    """Make calls of this thread need a planned mask."""
    _entered.depth += 1


def leave() -> None:
    _entered.depth -= 1


@compat.run_while_traced  # compiled code guards on the thread's modes, which entering changes too
def needs_plan() -> bool:
    return _entered.depth > 0
