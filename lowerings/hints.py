"""What decisions say about tuning hints that a route does not follow."""

from __future__ import annotations

from typing import Any

from .problem import AttentionProblem

# Torch's wrapper writes these into every call.
_DEFAULTS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "FORCE_USE_FLEX_ATTENTION": False,
}


def unused_hints(problem: AttentionProblem) -> list[str]:
    ignored = [name for name, value in problem.options.hints if says_something(name, value)]
    return [f"{', '.join(sorted(ignored))}: for GPU kernels, not used here"] if ignored else []


def says_something(name: str, value: Any) -> bool:
    return name not in _DEFAULTS or _DEFAULTS[name] != value
