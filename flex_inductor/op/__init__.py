"""The higher-order op: attention, its backward, and every rule torch asks of an op."""

from importlib import import_module

from .. import compat
from . import autograd, dispatch, saved  # noqa: F401 - their rules and ops register themselves
from .call import AttentionCall, BackwardCall, Inputs
from .eager import chunked_ops  # noqa: F401 - so do its ops
from .hop import attention, attention_backward, untraced

__all__ = ["AttentionCall", "BackwardCall", "Inputs", "attention", "attention_backward", "untraced"]

compat.when_imported("torch._dynamo", lambda _: import_module(f"{__name__}.dynamo.variables"))
compat.when_imported("torch.utils.flop_counter", lambda _: import_module(f"{__name__}.flops"))
