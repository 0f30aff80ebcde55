"""The routes, in the order they are asked, and the choice of the one that serves a call."""

from __future__ import annotations

from collections.abc import Sequence

from flex_inductor.softmax import COLUMN_SUMS

from . import errors
from .chunked import ChunkedRoute
from .cpu.route import CpuRoute
from .decision import Decision
from .problem import AttentionProblem
from .ring import RingRoute
from .route import Route
from .triton.route import TritonRoute

ROUTES: tuple[Route, ...] = (TritonRoute(), CpuRoute(), ChunkedRoute())
RING: tuple[Route, ...] = (RingRoute(),)  # for calls whose keys are spread over ranks


def decide(problem: AttentionProblem, routes: Sequence[Route]) -> tuple[Route, Decision]:
    """Ask the routes in order; an explicitly demanded one serves or raises."""
    demanded = problem.options.route
    rejected: list[tuple[str, str]] = []
    for i, route in enumerate(routes):
        asked = (*problem.inputs, *(name for name in problem.outputs if name == COLUMN_SUMS))
        missing = [name for name in asked if name not in route.serves]
        known = route.forms is None or problem.schedule in (None, *route.forms)
        if not known and "schedule" not in missing:
            missing.append(f"a schedule in {problem.schedule}")
        usable, why = (False, f"does not serve {', '.join(missing)}") if missing else route.can_use(problem)
        if usable and demanded in ("", route.name):
            later = "not asked for" if demanded else f"{route.name} comes first"
            rejected += [(other.name, later) for other in routes[i + 1 :]]
            why = f"asked for; {why}" if demanded else why
            eager = ["an eager call, with a kernel of its class"] if problem.options.eager else []
            notes = (*eager, *route.notes(problem))
            return route, Decision(problem.describe(), route.name, why, tuple(rejected), notes)
        rejected.append((route.name, why if not usable else f"not asked for; {why}"))
    raise errors.route_refused(demanded, Decision(problem.describe(), "none", "", tuple(rejected)))
