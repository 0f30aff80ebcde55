"""FlashAttention's functions, on any device, with mods beside their own arguments. See docs/flash.md.

As there, tensors are [batch, length, heads, head_dim] or packed [tokens, heads, head_dim], and causal masks and windows
are aligned at the end: the last query stands at the last key. Mods see positions aligned in the same way.
"""

from .cached import flash_attn_with_kvcache
from .combine import flash_attn_combine
from .functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .torch_varlen import varlen_attn

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "varlen_attn",
]
