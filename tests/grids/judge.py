"""The one place that says whether a result is right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# FlashAttention 2's tests allow outputs twice the error that dense attention makes in the inputs' dtype, and gradients
# three times. There it rounds scores to that dtype, here it does not, so that less is allowed.
# Beside that, in units of rounding of a result's dtype: the result itself may be rounded otherwise. And in units of fp32,
# of which the sums are.
RESULT_ROUNDINGS, SUM_ROUNDINGS = 1, 32


class Allowed(NamedTuple):
    """`times` the error of dense attention, gradients `of_gradients` times it, and so much more."""

    times: float = 2.0
    of_gradients: float = 3.0
    more: float = 0.0


USUAL = Allowed()


def wrong(
    name: str, got: Tensor, right: Tensor, rounded: Tensor, unit: float, allowed: Allowed = USUAL
) -> str | None:
    """What is wrong with `got`, or None. `rounded` is dense attention's; sums are of numbers up to `unit`."""
    if got.shape != right.shape:
        return f"{name}: shape {tuple(got.shape)} instead of {tuple(right.shape)}"
    if not right.numel():
        return None
    own = torch.finfo(got.dtype).eps
    got = got.to(right.dtype)
    finite = right.isfinite()
    if not finite.all():
        if not torch.equal(got[~finite], right[~finite]):
            return f"{name}: infinities or NaN differ"
        got, right, rounded = got[finite], right[finite], rounded[finite]
        if not right.numel():
            return None
    error = (got - right).abs_().max().item()
    dense_error = (rounded.to(right.dtype) - right).abs_().max().item()
    largest = right.abs().max().item()
    most = (allowed.of_gradients if name.startswith("d_") else allowed.times) * dense_error + allowed.more
    most += RESULT_ROUNDINGS * own * largest
    most += SUM_ROUNDINGS * torch.finfo(torch.float32).eps * max(unit, largest)
    if error <= most:  # false for NaN
        return None
    return f"{name}: error {error:.3g}, dense {dense_error:.3g}, allowed {most:.3g}, largest {largest:.3g}"
