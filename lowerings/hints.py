"""Notes of decisions: tuning hints that the route does not follow, and integers of 64 bits."""

from __future__ import annotations

from typing import Any

import torch

from flex_inductor.mod_ir.program import AXES
from flex_inductor.options import NUM_SPLITS

from .problem import AttentionProblem

# These ask for nothing; torch's wrapper writes them into every call.
_DEFAULTS = {
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
    """All other kernels have one part."""
    if decodes or problem.direction == "backward" or splits_asked(problem) <= 1:
        return []
    return [f"{NUM_SPLITS}: keys are in one part; only kernels for few queries split them"]


def says_something(name: str, value: Any) -> bool:
    return name not in _DEFAULTS or _DEFAULTS[name] != value


def wide_indices(problem: AttentionProblem) -> list[str]:
    """A note on each mod that computes with indices in int64."""
    found = []
    for name in ("score", "mask"):
        program: Any = getattr(problem.programs, name)
        nodes = [] if program is None else program.lane.graph.nodes
        casts = [node for node in nodes if node.target is torch.ops.aten._to_copy.default]
        indices = [cast.args[0].name for cast in casts if cast.meta["val"].dtype == torch.int64]
        if not set(AXES).isdisjoint(indices):
            found.append(f"{name}_mod: its indices are int64, as what it computes of them may leave int32")
    return found
