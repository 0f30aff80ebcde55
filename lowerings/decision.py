"""Which route serves a call, and why: one record, printed by the log, the error and the tools alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """The config of one of a call's kernels.

    Args:
        kernel: forward, decode, backward and the like.
        config: its sizes, by name.
        why: why this one.
        others: each config not taken, and its time or why it was left out.
        milliseconds: how long it took, where it was timed.

    Example:
        >>> from flex_inductor.lowerings.decision import Choice
        >>> config = {"block_m": 64, "block_n": 32, "stages": 0}
        >>> print(Choice("forward", config, "the first that fits"))
        forward block_m=64 block_n=32 (the first that fits)
    """

    kernel: str
    config: dict[str, int]
    why: str
    others: tuple[tuple[str, str], ...] = ()
    milliseconds: float | None = None

    def __str__(self) -> str:
        return f"{self.kernel} {config_text(self.config)} ({self.why})"


def config_text(config: Mapping[str, Any]) -> str:
    """A config in words. Fields that are 0 are left out: they are features not used."""
    return " ".join(f"{name}={value}" for name, value in config.items() if value)


class Decision(NamedTuple):
    """Which route serves a call, and why.

    Args:
        call: the problem in a line.
        chosen: the name of the route.
        why: why this one.
        rejected: (route, reason) of every other, in their order.
        notes: hints that did not apply, and the like.
        kernels: a `Choice` for each kernel.

    Example:
        >>> query = torch.randn(1, 1, 1024, 40)
        >>> out = flex_attention(query, query, query)
        >>> flex_inductor.decisions()[-1].chosen
        'chunked'
    """

    call: str
    chosen: str
    why: str
    rejected: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    kernels: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        lines = [f"call:     {self.call}", f"chosen:   {self.chosen}{why}"]
        lines += [f"config:   {choice}" for choice in self.kernels]
        lines += [f"rejected: {name}: {reason}" for name, reason in self.rejected]
        lines += [f"note:     {note}" for note in self.notes]
        return "\n".join(lines)
