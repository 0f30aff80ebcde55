"""The errors about work, balancers and the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import FlexTypeError, FlexValueError


def no_masks() -> FlexValueError:
    return FlexValueError(
        "masks: expected at least one mask, got an empty mapping. Pass {'full': None} for no mask."
    )


def not_a_mask(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"masks: {name}: expected a BlockMask, a RunSchedule, Sequences, a mask_mod or None, got "
        f"{type(value).__name__}. Make one with create_block_mask(mask_mod, B, H, length, length)."
    )


def no_length(name: str) -> FlexValueError:
    return FlexValueError(
        f"length: expected one, as mask {name} is a function or None and does not say how long the sequence is. "
        "Pass length=, of all ranks together."
    )


def other_length(name: str, queries: int, keys: int, expected: int) -> FlexValueError:
    return FlexValueError(
        f"masks: {name}: expected {expected} queries and keys, one length for all masks, got {queries} x {keys}. "
        "Plan sequences of other lengths by themselves."
    )


def bad_tile(tile: Any, least: int) -> FlexValueError:
    return FlexValueError(f"tile: expected a multiple of {least}, of all block sizes, got {tile!r}.")


def other_weights(given: Any, names: Sequence[str]) -> FlexValueError:
    return FlexValueError(
        f"weights: expected one for each mask ({', '.join(names)}), got {given!r}. Leave it out for 1 each."
    )


def bad_weight(name: str, value: Any) -> FlexValueError:
    return FlexValueError(
        f"weights: {name}: expected a number above 0, such as how many layers use the mask, got {value!r}."
    )


def not_packed(name: str) -> FlexValueError:
    return FlexValueError(
        f"masks: {name}: expected sequences whose queries and keys are packed alike, got ones with keys elsewhere or "
        "tokens left out. Pass Sequences(cu_q), with nothing else."
    )


def bad_ranks(value: Any) -> FlexValueError:
    return FlexValueError(f"ranks: expected an integer of at least 1, got {value!r}.")


def unknown_balance(value: Any, known: Iterable[str]) -> FlexValueError:
    return FlexValueError(
        f"balance: expected one of {', '.join(known)}, a function (work, ranks) -> owners, or one of torch's load "
        f"balancers, got {value!r}."
    )


def bad_owners(name: str, what: str, tiles: int, ranks: int) -> FlexValueError:
    return FlexValueError(
        f"balance {name}: expected a rank from 0 to {ranks - 1} for each of {tiles} tiles, got {what}."
    )


def splits_tiles(name: str, tile: int, one: int, other: int) -> FlexValueError:
    return FlexValueError(
        f"balance {name}: its order of tokens gives tokens of one tile of {tile} to several ranks, such as {one} and "
        f"{other}. Use lengths that divide by 2 * ranks * {tile}, smaller blocks, or balance='head_tail' or "
        "'documents', which cut between tiles."
    )


def other_order(name: str, what: str, expected: int) -> FlexValueError:
    return FlexValueError(
        f"balance {name}: expected one order of {expected} tokens, the same for all batches, got {what}. "
        "A layout is one for all batches and heads: plan batches that differ by themselves."
    )


def unknown_method(value: Any, known: Iterable[str]) -> FlexValueError:
    return FlexValueError(f"method: expected one of {', '.join(known)}, got {value!r}.")
