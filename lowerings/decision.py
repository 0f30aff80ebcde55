"""Which route serves a call, and why: one record, printed by the log, the error and the tools alike."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._logging import trace_structured

from flex_inductor import errors

from . import last

if TYPE_CHECKING:
    from .problem import AttentionProblem
    from .routes import Route

log = logging.getLogger("flex_inductor")


class Choice(NamedTuple):
    """The config of one of a call's kernels."""

    kernel: str
    config: dict[str, int]
    why: str
    others: tuple[tuple[str, str], ...] = ()  # each config not taken, and its time or why it was left out
    milliseconds: float | None = None  # where it was timed

    def __str__(self) -> str:
        return f"{self.kernel} {config_text(self.config)} ({self.why})"


def config_text(config: Mapping[str, Any]) -> str:
    """What a config does without (0) is not named."""
    return " ".join(f"{name}={value}" for name, value in config.items() if value)


class Decision(NamedTuple):
    """The whole answer for one call."""

    call: str  # the problem in a line
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]  # (route, reason) of every other, in their order
    notes: tuple[str, ...] = ()  # hints that did not apply, and the like
    kernels: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        lines = [f"call:     {self.call}", f"chosen:   {self.chosen}{why}"]
        lines += [f"config:   {choice}" for choice in self.kernels]
        lines += [f"rejected: {name}: {reason}" for name, reason in self.rejected]
        lines += [f"note:     {note}" for note in self.notes]
        return "\n".join(lines)


_recent: deque[Decision] = deque(maxlen=4096)
_made_here: set[str] = set()


def record(decision: Decision, node: str, number: int) -> str:
    """Log a decision made for the graph node `node`, the call of that number in Dynamo's graph.

    Returns a line for the generated code, so that code from a cache brings its decisions with it.
    """
    _tell(decision, number)
    text = json.dumps([node, number, *decision])
    _made_here.add(text)
    return f"from {__name__} import restore; restore({text!r})"


def restore(text: str) -> None:
    """Called by generated code when it is loaded: record its decision if it was made in another process."""
    if text in _made_here:
        _made_here.discard(text)
        return
    _, number, call, chosen, why, rejected, notes, kernels = json.loads(text)
    choices = [
        Choice(kernel, config, why, tuple(map(tuple, others)), milliseconds)
        for kernel, config, why, others, milliseconds in kernels
    ]
    _tell(Decision(call, chosen, why, tuple(map(tuple, rejected)), tuple(notes), tuple(choices)), number)


def _tell(decision: Decision, number: int) -> None:
    _recent.append(decision)
    last.note(decision, number)
    log.info("%s", decision)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "flex_inductor_decision", "encoding": "string"},
        payload_fn=lambda: str(decision),
    )


def decisions(*, clear: bool = False) -> list[Decision]:
    """The record of every attention call compiled since the last `decisions(clear=True)`."""
    found = list(_recent)
    if clear:
        for _ in found:  # what another thread adds meanwhile stays for the next call
            _recent.popleft()
    return found


def decide(problem: AttentionProblem, routes: Sequence[Route]) -> tuple[Route, Decision]:
    """Ask the routes in order; an explicitly demanded one serves or raises."""
    demanded = problem.options.route
    rejected: list[tuple[str, str]] = []
    for i, route in enumerate(routes):
        missing = [name for name in problem.inputs if name not in route.serves]
        usable, why = (False, f"does not serve {', '.join(missing)}") if missing else route.can_use(problem)
        if usable and demanded in ("", route.name):
            later = "not asked for" if demanded else f"{route.name} comes first"
            rejected += [(other.name, later) for other in routes[i + 1 :]]
            why = f"asked for; {why}" if demanded else why
            notes = tuple(route.notes(problem))
            return route, Decision(problem.describe(), route.name, why, tuple(rejected), notes)
        rejected.append((route.name, why if not usable else f"not asked for; {why}"))
    raise errors.route_refused(demanded, Decision(problem.describe(), "none", "", tuple(rejected)))
