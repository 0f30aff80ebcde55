"""The errors about FlashAttention's arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import FlexNotImplementedError, FlexTypeError, FlexValueError, described


def half_of_new(name: str, other: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: is not given, and {other} is; expected both or none. New keys have new values."
    )


def new_without_lengths() -> FlexValueError:
    return FlexValueError(
        "cache_seqlens: expected the lengths before the new keys, got None. Without them there is no room for k and v."
    )


def descale_of_wide(name: str, dtype: Any) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected none for a tensor of {dtype}, it is for float8_e4m3fn and float8_e5m2. Leave it out, or "
        "convert the tensor."
    )


def bad_descale(name: str, got: Any, shape: tuple[int, int]) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected a number for each sequence and KV head, {list(shape)}, got {described(got)}. Expand it."
    )


def half_of_rotary(name: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected rotary_cos and rotary_sin, got only one of them. Give both or none."
    )


def rotary_without_new() -> FlexValueError:
    return FlexValueError(
        "rotary_cos: expected new keys k and v with it; those in the cache count as rotated. Give them, or rotate q "
        "before."
    )


def padded_pages() -> FlexValueError:
    return FlexValueError(
        "cache_leftpad: expected none with block_table; a sequence begins where its first page does. Leave it out."
    )


def two_tables() -> FlexValueError:
    return FlexValueError("page_table: is another name of block_table, and both are given. Leave one out.")


def too_long(name: str, tokens: int, room: int) -> FlexValueError:
    return FlexValueError(
        f"{name}: {tokens} tokens do not fit into a room of {room}. Shorten it, or make the cache longer."
    )


def not_lengths(name: str, value: Any, count: int) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected an int32 tensor of {count} entries, or an integer from 0 on, got {value!r}."
    )


def other_batch(name: str, tensor: Tensor, batch: int) -> FlexValueError:
    return FlexValueError(f"{name}: has batch {tensor.size(0)}, and q has {batch}; expected the same.")


def without_lengths() -> FlexValueError:
    return FlexValueError(
        "cu_seqlens_q: expected max_seqlen_q with it, the most queries that a sequence has. Give both or none."
    )


def bad_chunk(value: Any) -> FlexValueError:
    return FlexValueError(f"attention_chunk: expected a number of tokens, 0 for any, got {value!r}.")


def not_floats(name: str, value: Any) -> FlexTypeError:
    found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    return FlexTypeError(f"{name}: expected a float tensor, got {found}.")


def parts_differ(out: Tensor, lse: Tensor) -> FlexValueError:
    return FlexValueError(
        f"lse_partial: expected the shape of out_partial without its last dimension, and a part or more, got "
        f"{list(lse.shape)} and {list(out.shape)}. FlashAttention has [parts, batch, length, heads]."
    )


def bad_out(out: Tensor, parts: Tensor) -> FlexValueError:
    return FlexValueError(
        f"out: expected shape {list(parts.shape[1:])}, that of a part, got {list(out.shape)}."
    )


def other_rank(name: str, tensor: Tensor, q: Tensor) -> FlexValueError:
    return FlexValueError(
        f"{name}: has shape {list(tensor.shape)} and q {list(q.shape)}; expected both padded, or both packed with "
        "cu_seqlens_q."
    )


def other_layout(name: str, tensor: Tensor, layout: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected {layout}, got shape {list(tensor.shape)}. flex_attention has heads before length, and "
        "unpad(tensor, mask) packs tokens."
    )


def bad_softcap(softcap: Any) -> FlexTypeError:
    return FlexTypeError(f"softcap: expected a number, 0 or less for none, got {softcap!r}.")


def bad_slopes(slopes: Tensor, batch: int, heads: int) -> FlexValueError:
    return FlexValueError(
        f"alibi_slopes: expected a slope for each head, shape {[heads]} or {[batch, heads]}, got {list(slopes.shape)}."
    )


def bad_length(name: str, length: Any) -> FlexValueError:
    return FlexValueError(f"{name}: expected an integer from 0 on, got {length!r}.")


def bad_flag(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(f"{name}: expected True or False, got {value!r}.")


def offsets_of_padded(name: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected none with k and v [batch, length, heads, head_dim], which have their lengths. Leave it out, "
        "or pack k and v."
    )


def probabilities_of_pages() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "return_attn_probs: got True with dropout and keys in pages, whose probabilities are not made. Pass False, or "
        "packed keys."
    )


def bad_window(value: Any) -> FlexValueError:
    return FlexValueError(
        f"window_size: expected a pair (left, right) of token counts, -1 for any, got {value!r}."
    )
