"""What `with cp:` serves: attention of torch's that knows no masks, on what this rank has."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .. import compat
from ..attention import flex_attention
from ..checks import refused
from . import errors

SERVED = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
CHECKPOINT = inspect.unwrap(checkpoint).__code__


class Serving(TorchFunctionMode):
    """Serves scaled_dot_product_attention, with `dense`, the planned masks that are causal and not."""

    def __init__(self, dense: dict[bool, Any]):
        super().__init__()
        self.dense = dense
        self.checkpoints = _checkpoints()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SERVED:
            return self._attend(*args, **kwargs)
        if func is torch.ops.higher_order.flex_attention:
            refused(errors.flex_of_torch())
        if func is not multi_head:
            return func(*args, **kwargs)
        if kwargs.get("need_weights", True):
            refused(errors.weights_of_heads())
        with self:
            return multi_head_body(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            refused(errors.attention_mask())
        if _checkpoints() > self.checkpoints:
            refused(errors.checkpointed())
        mask = self.dense[is_causal]
        return flex_attention(query, key, value, None, mask, scale, enable_gqa, dropout_p=dropout_p)


def _body(function: Any) -> Any:
    """A copy of the function that does not offer itself to modes, so that they see what it calls."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    body = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


multi_head = torch.nn.functional.multi_head_attention_forward
multi_head_body = _body(multi_head)


@compat.run_while_traced
def _checkpoints() -> int:
    """How many calls of torch.utils.checkpoint this one is inside of. While compiling none: the graph recomputes."""
    if torch.compiler.is_compiling():
        return 0
    frame: types.FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is CHECKPOINT
        frame = frame.f_back
    return count
