"""The errors about sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import FlexTypeError, FlexValueError, described


class SequencesError(FlexValueError):
    r"""An argument about packed sequences has a value that cannot be served.

    Example:
        >>> try:
        ...     Sequences(torch.tensor([0, 5, 3], dtype=torch.int32))
        ... except flex_inductor.FlexError as error:
        ...     print(*str(error).split(". "), sep="\n")
        cu_q: expected offsets that start at 0 and never fall, but it falls from 5 to 3 at entry 2
        They are the running sum of the lengths.
    """


def not_offsets(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected an int32 tensor of one dimension, got {described(value)}. Pass {name}.to(torch.int32)."
    )


def not_lengths(name: str, value: Any, count: int) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected an int32 tensor with an entry for each of {count} sequences, got {described(value)}."
    )


def not_integers(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected a list of integers or an integer tensor of one dimension, got {described(value)}. "
        "Give each sequence its number of tokens."
    )


def bad_lengths(name: str, most: int) -> SequencesError:
    return SequencesError(
        f"{name}: expected lengths from 0 on that add up to at most {most:,}, which offsets can hold. "
        "Split them into several calls, or mend the negative one."
    )


def no_first_offset(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: expected the offset 0 and one more for each sequence, got no entries. For none, pass [0]."
    )


def bad_offsets(name: str, values: list[int]) -> SequencesError:
    at = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), 0)
    found = (
        f"starts at {values[0]}" if at == 0 else f"falls from {values[at - 1]} to {values[at]} at entry {at}"
    )
    return SequencesError(
        f"{name}: expected offsets that start at 0 and never fall, but it {found}. "
        "They are the running sum of the lengths."
    )


def other_count(name: str, count: int, expected: int, other: str = "cu_q") -> SequencesError:
    return SequencesError(
        f"{name}: has {count} sequences and {other} has {expected}; expected as many. "
        "Give each sequence an entry in both."
    )


def used_beyond_room(name: str, sequence: int, used: int, room: int | None) -> SequencesError:
    if room is None:
        return SequencesError(f"{name}: sequence {sequence} uses {used} tokens; expected 0 or more.")
    return SequencesError(
        f"{name}: sequence {sequence} uses {used} tokens of a room of {room}; expected 0 to {room}. "
        "Shorten it, or give it more room."
    )


def bad_max(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected an integer, got {described(value)}. It is the most tokens that a sequence ever has."
    )


def max_below(name: str, given: Any, longest: int) -> SequencesError:
    return SequencesError(
        f"{name}: is {given}, and the longest sequence has {longest} tokens; expected at least that."
    )


def other_device(name: str, device: Any, expected: Any) -> SequencesError:
    return SequencesError(
        f"{name}: is on {device}, and cu_q on {expected}; expected one device. Move it there."
    )


def wrong_rank(name: str, tensor: Tensor) -> SequencesError:
    return SequencesError(
        f"{name}: expected [tokens, heads, head_dim], got shape {list(tensor.shape)}. "
        f"Padded tensors: unpad({name}, mask) packs them."
    )


def too_few_tokens(name: str, tokens: int, needed: int) -> SequencesError:
    return SequencesError(
        f"{name}: has {tokens} tokens, and the offsets end at {needed}; expected at least as many."
    )


def not_sequences(value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"sequences: expected a flex_inductor.Sequences, got {type(value).__name__}. "
        "Make one of the offsets: Sequences(cu_q)."
    )


def not_a_sequence_mask(value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"block_mask: expected what sequences.mask(mask_mod) returns, got {type(value).__name__}. "
        "A mask over all packed tokens does not know where sequences begin."
    )


MASK_OF_OTHERS = "block_mask: was made by other sequences than these. Call sequences.mask(mask_mod) on these."


def mask_of_others() -> SequencesError:
    return SequencesError(MASK_OF_OTHERS)


def bad_block_size(value: Any) -> SequencesError:
    return SequencesError(
        f"block_size: expected a positive integer or a pair of them (queries, keys), got {value!r}."
    )


def bad_heads(value: Any) -> SequencesError:
    return SequencesError(
        f"heads: expected the number of query heads, got {value!r}. It is needed where mask_mod reads h."
    )


def mask_heads(heads: int, expected: int) -> SequencesError:
    return SequencesError(
        f"block_mask: was made for {heads} heads, and query has {expected}; expected as many. "
        f"Pass heads={expected} to sequences.mask."
    )


def mask_in_graph() -> SequencesError:
    return SequencesError(
        "mask_mod: sequences.mask was called inside a compiled graph; expected outside, where mask_mod can be traced. "
        "Make the mask once a step, before the model runs, and pass it in."
    )


def block_beyond_page(block: int, page: int | None) -> SequencesError:
    return SequencesError(
        f"block_size: a block of {block} keys would span pages of {page}; expected a divisor of the page size. "
        "Leave it out to have one that fits."
    )


def without_room(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: is for keys in a cache or in pages; expected used_k with it and no cu_k. "
        "used_k says how many tokens of each sequence there are."
    )


def pages_with(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: expected none with pages; where sequences lie is in the table. Leave it out."
    )


def pages_without_size() -> SequencesError:
    return SequencesError(
        "page_size: expected a positive integer with pages, as pages have that many tokens, and none without."
    )


def bad_table(name: str, value: Any, count: int) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected an int32 tensor [sequences, pages of each] for {count} sequences, got {described(value)}."
    )


def negative_page(sequence: int, place: int) -> SequencesError:
    return SequencesError(
        f"pages: sequence {sequence} uses page {place} of its table, which is negative; expected a page of the pool."
    )


def left_pad_beyond(sequence: int, pad: int, used: int) -> SequencesError:
    return SequencesError(
        f"left_pad_k: sequence {sequence} has {pad} tokens of padding and used_k is {used}; expected 0 to {used}."
    )


def negative_row(sequence: int) -> SequencesError:
    return SequencesError(f"cache_rows: of sequence {sequence} is negative; expected a row of the cache.")


def not_a_cache(name: str, value: Any, paged: bool) -> SequencesError:
    shape = "[pages, page_size, heads, head_dim]" if paged else "[rows, length, heads, head_dim]"
    return SequencesError(
        f"{name}: expected {shape} for these sequences, got {described(value)}. Packed keys need cu_k."
    )


def cache_too_short(name: str, length: int, needed: int) -> SequencesError:
    return SequencesError(
        f"{name}: its rows have {length} tokens, and max_k is {needed}; expected at least as many."
    )


def too_few_rows(name: str, rows: int, needed: int) -> SequencesError:
    return SequencesError(
        f"{name}: has {rows} rows for {needed} sequences; expected at least as many, or cache_rows to say which."
    )


def other_page_size(name: str, found: int, expected: int) -> SequencesError:
    return SequencesError(
        f"{name}: its pages have {found} tokens, and page_size is {expected}; expected the same."
    )


def cache_needs_grad(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: requires grad and lies in a cache, which has no gradient. Detach it, or pass packed keys with cu_k."
    )


def page_beyond(sequence: int, place: int, page: int, pages: int) -> SequencesError:
    return SequencesError(
        f"pages: sequence {sequence} has page {page} at place {place} of its table; expected one of the {pages} pages "
        "of the pool. Mend the table, or what used_k says."
    )


def row_beyond(sequence: int, row: int, rows: int) -> SequencesError:
    return SequencesError(
        f"cache_rows: sequence {sequence} is in row {row}; expected one of the {rows} rows of the cache."
    )


def append_to_packed() -> SequencesError:
    return SequencesError(
        "sequences: have their keys packed; expected keys in a cache or in pages, which have room for more. "
        "Give used_k, and no cu_k."
    )


def not_new_tokens(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected a tensor [tokens, heads, head_dim] of new tokens, got {described(value)}. "
        "Keys and values are appended together."
    )


def not_as_the_cache(name: str, tensor: Tensor, cache: Tensor) -> SequencesError:
    expected = f"{cache.dtype} of shape [tokens, {cache.size(2)}, {cache.size(3)}]"
    return SequencesError(f"{name}: expected {expected} for its cache, got {described(tensor)}.")


def caches_differ(k_cache: Tensor, v_cache: Tensor) -> SequencesError:
    return SequencesError(
        f"v_cache: has shape {list(v_cache.shape)} and k_cache {list(k_cache.shape)}; expected the same but for the "
        "last dimension."
    )


def new_tokens_differ(k: Tensor, v: Tensor) -> SequencesError:
    return SequencesError(
        f"v: has {v.size(0)} tokens and k has {k.size(0)}; expected as many. Append them together."
    )


def append_needs_grad(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: requires grad, and there is no gradient through a cache. Detach it, or append under torch.no_grad()."
    )


def without_rotary() -> SequencesError:
    return SequencesError("q: is given to be rotated, without rotary=(cos, sin). Give both or none.")


def bad_rotary(value: Any) -> FlexTypeError:
    parts = value if isinstance(value, (tuple, list)) else [value]
    found = ", ".join(map(described, parts))
    return FlexTypeError(f"rotary: expected (cos, sin), two float tensors [positions, pairs], got {found}.")


def rotary_differ(cos: Tensor, sin: Tensor) -> SequencesError:
    return SequencesError(
        f"rotary: cos is {described(cos)} and sin {described(sin)}; expected the same of both."
    )


def rotary_too_wide(pairs: int, dim: int) -> SequencesError:
    return SequencesError(
        f"rotary: rotates {pairs} pairs, and heads have {dim} dimensions; expected at most {dim // 2} pairs."
    )


def rotary_too_short(positions: int, needed: int) -> SequencesError:
    return SequencesError(
        f"rotary: has {positions} positions, and sequences may have {needed} tokens; expected as many positions."
    )


def not_as_k(q: Tensor, k: Tensor) -> SequencesError:
    return SequencesError(
        f"q: has heads of {q.size(2)} dimensions and k of {k.size(2)}; expected the same where both are rotated."
    )


def reads_heads(name: str) -> SequencesError:
    return SequencesError(
        f"mask_mod {name}: reads h, but no number of heads was given. Pass heads= to sequences.mask."
    )


def padding_not_bool(mask: Any) -> FlexTypeError:
    return FlexTypeError(
        f"mask: expected a bool tensor [batch, length], True where there is a token, got {described(mask)}."
    )


def not_padded(padded: Any, mask: Tensor) -> FlexTypeError:
    return FlexTypeError(
        f"padded: expected a tensor of shape [{mask.size(0)}, {mask.size(1)}, ...], as mask has it, "
        f"got {described(padded)}. Pass the mask of this tensor."
    )


def not_packed(packed: Any, tokens: int) -> FlexTypeError:
    return FlexTypeError(
        f"packed: expected a tensor of {tokens} tokens, one where mask is True, got {described(packed)}. "
        "Pass the mask that it was packed with."
    )


def not_jagged(name: str, tensor: Any) -> FlexTypeError:
    given = type(tensor).__name__
    if isinstance(tensor, Tensor):
        given = "a nested tensor of another layout" if tensor.is_nested else "a dense tensor"
    return FlexTypeError(
        f"{name}: expected a nested tensor with layout=torch.jagged, got {given}. "
        "torch.nested.nested_tensor(list, layout=torch.jagged) makes one."
    )


def jagged_elsewhere(name: str) -> SequencesError:
    return SequencesError(
        f"{name}: expected a nested tensor [batch, heads, length, head_dim] whose length differs from sequence to "
        "sequence, got one of which another dimension does. Make it as [batch, length, heads, head_dim] and call "
        ".transpose(1, 2)."
    )


def other_offsets() -> SequencesError:
    return SequencesError(
        "value: is a nested tensor with other offsets than key. Make both from the same offsets: "
        "torch.nested.nested_tensor_from_jagged(values, key.offsets())."
    )


def not_a_mask_of_nested(value: Any) -> FlexTypeError:
    return FlexTypeError(
        "block_mask: expected what Sequences.from_nested(query, key).mask(mask_mod) returns, since query is nested, "
        f"got {type(value).__name__}."
    )
