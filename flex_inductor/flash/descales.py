"""FlashAttention-3's descales: what multiplies queries, keys and values of 8 bits, for each sequence and KV head.

Those of keys multiply the queries, those of values the output: sequences with other descales may share a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import refused
from ..softmax import is_narrow
from . import errors


class Descales(NamedTuple):
    """The arguments, [sequences, Hk]; None is 1."""

    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None

    def check(self, q: Tensor, k: Tensor, sequences: int) -> None:
        shape = (sequences, k.size(-2))
        for name, descale in self._asdict().items():
            if descale is None:
                continue
            of = q if name == "q_descale" else k
            if not is_narrow(of):
                refused(errors.descale_of_wide(name, of.dtype))
            if not isinstance(descale, Tensor) or tuple(descale.shape) != shape:
                refused(errors.bad_descale(name, descale, shape))

    def on_queries(self, q: Tensor, starts: Tensor | None) -> Tensor:
        """Queries [B, M, H, D], or packed ones that begin at `starts`."""
        for descale in (self.q_descale, self.k_descale):
            if descale is not None:
                q = q.to(torch.float32) * _of_rows(descale, q, starts)
        return q if self.q_descale is None and self.k_descale is None else q.to(torch.bfloat16)

    def on_output(self, out: Tensor, starts: Tensor | None) -> Tensor:
        """The same for the output."""
        if self.v_descale is None:
            return out
        return (out.to(torch.float32) * _of_rows(self.v_descale, out, starts)).to(out.dtype)


def _of_rows(descale: Tensor, rows: Tensor, starts: Tensor | None) -> Tensor:
    """In a shape that broadcasts to `rows`."""
    of_heads = descale.to(torch.float32).repeat_interleave(rows.size(-2) // descale.size(1), 1).unsqueeze(-1)
    if starts is None:
        return of_heads.unsqueeze(1)
    place = torch.arange(rows.size(0), device=starts.device, dtype=starts.dtype)
    return of_heads[torch.bucketize(place, starts[1:], right=True).clamp(max=descale.size(0) - 1)]
