"""Arguments beside mods: of the softmax itself, of narrow keys and values, and of what a call returns.

Dynamo traces what is in this folder.
"""

from .arguments import (
    RngState,
    Softmax,
    entropy_of_both,
    entropy_with_sinks,
    gradient_of_sinks,
    shares,
    weight_of_sinks,
    with_sinks,
)
from .narrow import NARROW, Scales, is_narrow
from .requests import (
    COLUMN_SUMS,
    MORE,
    OF_ROWS,
    REQUESTS,
    AuxOutput,
    AuxRequest,
    answer,
    asked,
    dropout_mask,
)

__all__ = [
    "COLUMN_SUMS",
    "MORE",
    "NARROW",
    "OF_ROWS",
    "REQUESTS",
    "AuxOutput",
    "AuxRequest",
    "RngState",
    "Scales",
    "Softmax",
    "answer",
    "asked",
    "dropout_mask",
    "entropy_of_both",
    "entropy_with_sinks",
    "gradient_of_sinks",
    "is_narrow",
    "shares",
    "weight_of_sinks",
    "with_sinks",
]
