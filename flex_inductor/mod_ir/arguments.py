"""The arguments of a mod, and their dtypes.

A mod is a function of one *lane*, that is of one score: 0-d tensors in, one 0-d tensor out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SCORE_LANES = ("score", "b", "h", "q_idx", "kv_idx")
MASK_LANES = SCORE_LANES[1:]
JOINT_LANES = (*SCORE_LANES, "grad_score")
TANGENT_LANES = (*SCORE_LANES, "score_along")
SECOND_LANES = (*JOINT_LANES, "score_along", "grad_score_along")
INDEX_DTYPE = torch.int32


def score_dtype(input_dtype: torch.dtype) -> torch.dtype:
    """Scores, softmax and accumulators are fp32, or fp64 for fp64 inputs."""
    return torch.float64 if input_dtype == torch.float64 else torch.float32


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def number_dtype(value: Any, query: Tensor) -> torch.dtype | None:
    """The dtype of the 0-d tensor that stands for a number; None if it is no number."""
    if isinstance(value, (float, torch.SymFloat)):
        return score_dtype(query.dtype)
    return torch.int64 if isinstance(value, (int, torch.SymInt)) else None


def example_lanes(like: Tensor, names: Sequence[str]) -> list[Tensor]:
    """One 0-d tensor for each lane argument, with the dtypes the kernels use."""
    floats = score_dtype(like.dtype)
    return [
        torch.zeros((), dtype=floats if "score" in name else INDEX_DTYPE, device=like.device)
        for name in names
    ]
