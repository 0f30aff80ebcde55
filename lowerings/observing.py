"""Lets a tool watch the lowering of attention calls, and compile kernels for a device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from .call import LoweredCall
from .decision import Decision
from .problem import AttentionProblem


class Observer:
    """Does nothing. A tool overrides the methods and fields that it needs."""

    target: str | None = None  # the architecture that Triton kernels are made for, None for the machine's own
    records = True  # whether decisions are logged and written down

    def lowered(
        self, call: LoweredCall, problem: AttentionProblem, decision: Decision, operations: Sequence[Any]
    ) -> None:
        """A direction of a call has become these operations of Inductor's graph."""

    def kernel_defined(self, operation: Any, name: str) -> None:
        """A KernelCall's Triton kernel has its name in the generated module, whose loading shows the source."""

    def kernel_rendered(self, operation: Any, kind: str, kernel: Any, source: str) -> None:
        """An operation's C++ kernel has its source, with a placeholder for its name."""


_NOBODY = Observer()
_current = ContextVar("flex_inductor_observer", default=_NOBODY)


def observer() -> Observer:
    """The observer of this thread."""
    return _current.get()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
