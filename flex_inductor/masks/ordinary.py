"""Masks made under inference mode are ordinary tensors: training may use them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from .. import compat

P = ParamSpec("P")
R = TypeVar("R")


def ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run outside of inference mode: a mask that is made for evaluation also serves training."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # In a trace the mode does not matter, and an export would keep leaving it as a node.
        if torch.compiler.is_dynamo_compiling() or compat.is_exporting():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run
