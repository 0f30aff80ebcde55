"""What a call asks of the softmax itself, and what it returns of it. Dynamo traces this room."""

from .arguments import RngState, Softmax, gradient_of_sinks, weight_of_sinks, with_sinks
from .requests import REQUESTS, AuxOutput, AuxRequest, answer, asked, dropout_mask

__all__ = [
    "REQUESTS",
    "AuxOutput",
    "AuxRequest",
    "RngState",
    "Softmax",
    "answer",
    "asked",
    "dropout_mask",
    "gradient_of_sinks",
    "weight_of_sinks",
    "with_sinks",
]
