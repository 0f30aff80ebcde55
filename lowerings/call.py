"""A call of one of the two ops, in Inductor's IR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flex_inductor.op.call import Inputs
from flex_inductor.options import CallOptions

if TYPE_CHECKING:  # routes are asked where Inductor is not needed
    from torch._inductor import ir


@dataclass(frozen=True)
class LoweredCall:
    """The op's arguments by name, as AttentionCall and BackwardCall have them; the last ones are the backward's."""

    query: ir.TensorBox
    key: ir.TensorBox
    value: ir.TensorBox
    score_mod: ir.Subgraph | None
    mask_mod: ir.Subgraph | None
    scale: float
    inputs: Inputs  # with IR nodes in place of tensors
    options: CallOptions
    out: ir.TensorBox | None = None
    lse: ir.TensorBox | None = None
    grad_out: ir.TensorBox | None = None
    grad_lse: ir.TensorBox | None = None
    joint: ir.Subgraph | None = None
    wants: tuple[str, ...] = ()
