"""Which route serves a call, and why: one record, printed by the log, the error and the tools alike."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

from torch._logging import trace_structured

log = logging.getLogger("flex_inductor")


class Decision(NamedTuple):
    """The whole answer for one call."""

    call: str  # the problem in a line
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]  # (route, reason), in the order they were asked
    notes: tuple[str, ...] = ()  # hints that did not apply, and the like

    def __str__(self) -> str:
        lines = [f"call:     {self.call}", f"chosen:   {self.chosen} ({self.why})"]
        lines += [f"rejected: {name}: {reason}" for name, reason in self.rejected]
        lines += [f"note:     {note}" for note in self.notes]
        return "\n".join(lines)


_recent: deque[Decision] = deque(maxlen=4096)


def record(decision: Decision) -> None:
    _recent.append(decision)
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
        _recent.clear()
    return found


def decide(problem: Any, routes: Any) -> tuple[Any, Decision]:
    """Ask the routes in order; an explicitly demanded one serves or raises."""
    from flex_inductor import errors

    demanded = problem.options.get("route")
    answers = [(route, *route.can_use(problem)) for route in routes]
    for at, (route, usable, why) in enumerate(answers):
        if usable and demanded in (None, route.name):
            rejected = [(r.name, reason) for r, ok, reason in answers[:at] if not ok]
            rejected += [(r.name, "not asked for") for r, ok, _ in answers[:at] if ok]
            decision = Decision(
                problem.describe(),
                route.name,
                f"asked for; {why}" if demanded else why,
                tuple(rejected),
                tuple(route.notes(problem)),
            )
            record(decision)
            return route, decision
    raise errors.route_refused(demanded, [(route.name, reason) for route, _, reason in answers])
