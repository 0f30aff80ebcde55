"""What arguments beside mods are refused for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import FlexError, FlexNotImplementedError, FlexTypeError, FlexValueError, described


def _number_or_kind(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float)) else described(value)


def bad_sinks(sinks: Any, heads: int) -> FlexError:
    kind = FlexValueError if isinstance(sinks, Tensor) else FlexTypeError
    return kind(
        f"sinks: expected a floating tensor with one number for each query head, [{heads}], got {described(sinks)}."
    )


def sinks_device(got: torch.device, expected: torch.device) -> FlexValueError:
    return FlexValueError(
        f"sinks: expected a tensor on {expected}, as query is, got one on {got}. Move it with .to()."
    )


def bad_dropout(value: Any) -> FlexError:
    kind = FlexValueError if isinstance(value, (int, float)) else FlexTypeError
    return kind(f"dropout_p: expected a number from 0 to less than 1, got {_number_or_kind(value)}.")


def bad_head_offset(value: Any, most: int) -> FlexError:
    kind = FlexValueError if isinstance(value, int) else FlexTypeError
    return kind(
        f"head_offset: expected the number of query's first head among all, from 0 to {most - 1}, got "
        f"{_number_or_kind(value)}."
    )


def too_many_heads(offset: int, heads: int, most: int) -> FlexError:
    return FlexValueError(
        f"dropout_p: expected at most {most} heads, got {heads} from head {offset} on. Beyond, two heads would lose "
        "the same weights."
    )


def bad_rng_state(value: Any) -> FlexError:
    kind = FlexValueError if isinstance(value, (Tensor, tuple, list)) else FlexTypeError
    return kind(
        f"rng_state: expected (seed, offset), two int64 tensors without dimensions, got {described(value)}. "
        "return_aux=AuxRequest(rng_state=True) gives the one of a call."
    )


def rng_state_device(got: torch.device, expected: torch.device) -> FlexValueError:
    return FlexValueError(
        f"rng_state: expected tensors on {expected}, as query is, got one on {got}. Move it with .to()."
    )


def derivative_of_entropy() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "return_aux: entropy has a gradient, but no forward mode (torch.func.jvp) and no second derivative. Ask for "
        "it in a call of its own, under torch.no_grad()."
    )


def request_of_a_part(name: str) -> FlexNotImplementedError:
    instead = "; the max_scores of all ranks' rows give it" if name == "head_max_scores" else ""
    return FlexNotImplementedError(
        f"return_aux: {name} is not there for a call that is spread over ranks. Ask for it in one process{instead}."
    )


def dropout_in_vmap() -> FlexValueError:
    return FlexValueError(
        "dropout_p: torch.func.vmap is not served with dropout, because all examples would lose the same weights. Pass "
        "them as one batch, or dropout_p=0.0."
    )


def scale_of_wide(name: str, dtype: torch.dtype) -> FlexValueError:
    return FlexValueError(
        f"{name}: got a scale where the tensor is {dtype}. Only float8_e4m3fn and float8_e5m2 have scales: pass None."
    )


def bad_narrow_scale(name: str, value: Any, shapes: Iterable[Any]) -> FlexError:
    kind = FlexValueError if isinstance(value, Tensor) else FlexTypeError
    allowed = ", ".join(str([*shape]) for shape in shapes)
    return kind(f"{name}: expected a floating tensor of one of the shapes {allowed}, got {described(value)}.")


def scale_device(name: str, got: torch.device, expected: torch.device) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected a tensor on {expected}, as key is, got one on {got}. Move it with .to()."
    )


def narrow_needs_grad(name: str, dtype: torch.dtype) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{name}: it requires a gradient, and attention to keys of {dtype} has none. Use torch.no_grad() or detach it."
    )


def narrow_part() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "key, k_scale: keys and values of 8 bits, and their scales, are not served for a call that is spread over "
        "ranks. Convert them to the query's dtype, and pass no scale."
    )
