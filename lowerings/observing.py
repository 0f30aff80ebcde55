"""How a tool looks on while attention calls are lowered, and has their kernels made for a device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from .decision import Decision
from .problem import AttentionProblem


class Observer:
    """Looks on and changes nothing. A tool overrides what it is for."""

    target: str | None = None  # the architecture that Triton kernels are made for, None for the machine's own
    records = True  # whether decisions are logged and written down

    def lowered(
        self, call: Any, problem: AttentionProblem, decision: Decision, operations: Sequence[Any]
    ) -> None:
        """A direction of a call has become these operations of Inductor's graph."""

    def kernel_defined(self, operation: Any, name: str) -> None:
        """The Triton kernel of a KernelCall has its name in the generated module, which has its source when loaded."""

    def kernel_rendered(self, operation: Any, kind: str, kernel: Any, source: str) -> None:
        """The C++ kernel of an operation has its source, but a placeholder for its name."""


_NOBODY = Observer()
_current = ContextVar("flex_inductor_observer", default=_NOBODY)


def observer() -> Observer:
    """Who looks on in this thread."""
    return _current.get()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
