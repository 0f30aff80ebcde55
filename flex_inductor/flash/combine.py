"""Attention to parts of the keys, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import refused
from ..errors import FlexError
from . import errors


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Put results of attention to parts of the keys together.

    Any shapes between the first dimension and the last will do.

    Args:
        out_partial: float [parts, B, M, H, V]. Each part has attended to keys of its own.
        lse_partial: float [parts, B, M, H].
        out: where the result is written, if given.
        out_dtype: of the result; that of the parts by default.

    Returns:
        tuple: (out [B, M, H, V], lse [B, M, H]).

    Raises:
        FlexValueError: the shapes do not fit.
        FlexTypeError: a tensor is not of floats.

    Example:
        >>> out = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two parts, one row, V = 2
        >>> lse = torch.tensor([[3.0], [1.0]]).log()  # the first has three times the weight
        >>> flash.flash_attn_combine(out, lse)
        (tensor([[0.7500, 0.2500]]), tensor([1.3863]))
    """
    try:
        _check(out_partial, lse_partial, out)
    except FlexError as error:
        refused(error)
    wide = torch.promote_types(lse_partial.dtype, torch.float32)
    lse = lse_partial.to(wide)
    peak = lse.amax(0)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # of a row without keys in any part
    weight = torch.exp(lse - peak)
    total = weight.sum(0)
    combined = (out_partial.to(wide) * weight.unsqueeze(-1)).sum(0)
    combined = combined / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    if out is None:
        out = combined.to(out_dtype or out_partial.dtype)
    else:
        out.copy_(combined)
    return out, total.log() + peak


def _check(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None) -> None:
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise errors.not_floats(name, tensor)
    if out_partial.dim() < 2 or out_partial.size(0) == 0 or lse_partial.shape != out_partial.shape[:-1]:
        raise errors.parts_differ(out_partial, lse_partial)
    if out is not None and not (isinstance(out, Tensor) and out.is_floating_point()):
        raise errors.not_floats("out", out)
    if out is not None and out.shape != out_partial.shape[1:]:
        raise errors.bad_out(out, out_partial)
