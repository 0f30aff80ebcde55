"""Packed sequences: many of them, of any lengths, in one call without padding."""

from . import nested as nested  # serves flex_attention of nested tensors
from .append import append_kv
from .attention import varlen_attention
from .mask import SequenceMask
from .padding import pad, unpad
from .sequences import Sequences

__all__ = ["SequenceMask", "Sequences", "append_kv", "pad", "unpad", "varlen_attention"]
