"""What a call asks of the softmax itself, beside its mods."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import errors
from ..mod_ir.arguments import score_dtype


class Softmax(NamedTuple):
    """The arguments as the user gave them."""

    sinks: Tensor | None = None  # [H]

    def check(self, query: Tensor) -> None:
        """Refuse what does not fit queries [B, H, M, D]."""
        sinks, heads = self.sinks, query.size(1)
        if sinks is None:
            return
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
            raise errors.bad_sinks(sinks, heads)
        if sinks.device != query.device:
            raise errors.sinks_device(sinks.device, query.device)

    def of_heads(self, first: Any, count: Any) -> Softmax:
        """Of these heads alone."""
        return Softmax(None if self.sinks is None else self.sinks.narrow(0, first, count))

    def inputs(self, query: Tensor) -> dict[str, Any]:
        """The op's inputs, by name."""
        if self.sinks is None:
            return {}
        return {"sinks": self.sinks.to(score_dtype(query.dtype)).unsqueeze(0)}
