"""The routes, in the order they are asked. Adding a family of kernels is adding a route here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .chunked import ChunkedRoute
from .cpu.route import CpuRoute
from .problem import AttentionProblem
from .triton.route import TritonRoute


class Route(Protocol):
    """One way to serve a call."""

    name: str
    serves: frozenset[str]  # the optional inputs that it knows

    def available(self) -> tuple[bool, str]:
        """Whether this machine can run the route at all, and why or why not."""
        ...

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        """Whether the route serves this call, and why or why not."""
        ...

    def notes(self, problem: AttentionProblem) -> Sequence[str]:
        """What the decision should say about hints that the route does not follow."""
        ...

    def lower(self, problem: AttentionProblem, inputs: Any) -> Any:
        """Inductor IR for the op's outputs, from the IR of its inputs."""
        ...


ROUTES: tuple[Route, ...] = (TritonRoute(), CpuRoute(), ChunkedRoute())
