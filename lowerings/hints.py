"""What decisions say about tuning hints that a route does not follow."""

from __future__ import annotations

from typing import Any

from flex_inductor.options import NUM_SPLITS

from .problem import AttentionProblem

# Torch's wrapper writes these into every call.
_DEFAULTS = {
    NUM_SPLITS: 0,
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "FORCE_USE_FLEX_ATTENTION": False,
}


def unused_hints(problem: AttentionProblem) -> list[str]:
    ignored = [
        name for name, value in problem.options.hints if says_something(name, value) and name != NUM_SPLITS
    ]
    return [f"{', '.join(sorted(ignored))}: for GPU kernels, not used here"] if ignored else []


def splits_asked(problem: AttentionProblem) -> int:
    """How many parts of the keys a call asks for; 0 for any number."""
    return problem.options.hinted.get(NUM_SPLITS, 0)


def unused_splits(problem: AttentionProblem, decodes: bool) -> list[str]:
    """One part is what all other kernels have."""
    if decodes or problem.direction == "backward" or splits_asked(problem) <= 1:
        return []
    return [f"{NUM_SPLITS}: keys are in one part; only kernels for few queries split them"]


def says_something(name: str, value: Any) -> bool:
    return name not in _DEFAULTS or _DEFAULTS[name] != value
