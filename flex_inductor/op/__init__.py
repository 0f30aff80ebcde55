"""The higher-order op: attention, its backward, and every rule torch asks of an op."""

from importlib import import_module

from .. import compat
from . import autograd, chunked_ops, rules, saved  # noqa: F401 - their rules and ops register themselves
from .hop import AttentionCall, attention, attention_backward

__all__ = ["AttentionCall", "attention", "attention_backward"]

compat.when_imported("torch._dynamo", lambda _: import_module(f"{__name__}.dynamo"))
compat.when_imported("torch.utils.flop_counter", lambda _: import_module(f"{__name__}.flops"))
