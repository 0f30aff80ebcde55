"""Which route serves a call, and why: one record, printed by the log, the error and the tools alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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
    """A config in words. Fields that are 0 are left out: they are features not used."""
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
