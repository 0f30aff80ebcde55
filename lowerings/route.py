"""A route: the protocol of a family of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .call import LoweredCall
from .decision import Choice
from .problem import AttentionProblem


class Route(Protocol):
    """One way to serve a call."""

    name: str
    serves: frozenset[str]  # the optional inputs that it knows

    @property
    def forms(self) -> frozenset[str] | None:
        """Those of the schedules that it reads; None for any."""
        ...

    def available(self) -> tuple[bool, str]:
        """Whether this machine can run the route at all, and why or why not."""
        ...

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        """Whether the route serves this call, and why or why not."""
        ...

    def notes(self, problem: AttentionProblem) -> Sequence[str]:
        """Notes for the decision on hints that the route does not follow."""
        ...

    def lower(self, problem: AttentionProblem, call: LoweredCall) -> tuple[Any, Sequence[Choice]]:
        """Inductor IR for the op's outputs, and the config of each kernel that was made."""
        ...
