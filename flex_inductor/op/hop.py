"""The two higher-order ops.

`attention` takes both mods as callables (FX graphs once Dynamo has traced them) and the tensors they
capture as inputs. `attention_backward` also takes the joint graph, which `mod_ir.trace.trace_joint` makes.
What torch's dispatcher, tracers and transforms do with the ops is in `autograd`, `dispatch` and `flops`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map_only

from .. import compat, errors
from .call import AttentionCall, BackwardCall
from .prepare import lift_captures
from .saved import save


class Attention(HigherOrderOperator):
    """(out, logsumexp, max_scores), the last two per row and in natural logarithm."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = lift_captures(AttentionCall.read(*args))
        if compat.is_exporting():
            return save(call)
        return super().__call__(*call.wire())


class AttentionBackward(HigherOrderOperator):
    """(d query, d key, d value, (d capture, ...)), None for what needs none."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention_backward", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple]:
        # The pullback of torch.func.vjp may be called once the transform has ended.
        return super().__call__(
            *tree_map_only(Tensor, torch._C._functorch.unwrap_if_dead, BackwardCall.read(*args).wire())
        )


class Refusal(HigherOrderOperator):
    """Raises an error; where Dynamo may not break the graph, the user gets this error and not Dynamo's of it."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_refusal")

    def __call__(self, kind: type[errors.FlexError], *args: Any) -> NoReturn:
        raise kind(*args)


attention = Attention()
attention_backward = AttentionBackward()
refusal = Refusal()
