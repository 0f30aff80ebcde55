"""The higher-order op: attention, its backward, and every rule torch asks of an op."""

from .attention import AttentionCall, attention, attention_backward

__all__ = ["AttentionCall", "attention", "attention_backward"]
