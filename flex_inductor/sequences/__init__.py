"""Packed sequences: many of them, of any lengths, in one call without padding."""

from . import nested as nested  # serves flex_attention of nested tensors
from .attention import varlen_attention
from .mask import SequenceMask
from .padding import pad, unpad
from .sequences import Sequences

__all__ = ["SequenceMask", "Sequences", "pad", "unpad", "varlen_attention"]
