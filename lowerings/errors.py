"""The errors of choosing, building and keeping kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flex_inductor.errors import FlexRuntimeError, FlexValueError, TooManyKernels


def too_many_layouts(limit: int) -> TooManyKernels:
    return TooManyKernels(
        f"{limit} kernels were compiled for calls that differ only in how their tensors lie in memory. Pass tensors of "
        "one layout, for example with .contiguous()."
    )


def index_out_of_bounds(error: RuntimeError) -> IndexError:
    """For a mod that reads beyond a tensor in a kernel of an eager call."""
    found = str(error).rpartition("index out of bounds")[2].strip(" :")
    return IndexError(
        f"index out of bounds: a mod reads a captured tensor beyond its size ({found} is false), for a score that the "
        "mask leaves. Pass a larger tensor, or clamp the index."
    )


def route_refused(demanded: str, decision: Any) -> FlexRuntimeError:
    """`decision` is the record that the inspector prints, with no route chosen."""
    if demanded:
        asked = f"route {demanded!r} was asked for and cannot serve this call."
    else:
        asked = "no route can serve this call, each for its own reason."
    return FlexRuntimeError(f"{asked}\n{decision}")


def out_of_resources(kind: str, tried: Sequence[tuple[str, str]]) -> FlexRuntimeError:
    lines = "".join(f"\n  {config}: {reason}" for config, reason in tried)
    return FlexRuntimeError(
        f"no config of the kernel {kind!r} can run on this GPU. Tried:{lines}\nTry smaller tiles or fewer stages in "
        f"options={{'configs': {{{kind!r}: ...}}}}, or options={{'route': 'chunked'}}."
    )


def not_tuning_results(path: Any, why: Exception) -> FlexValueError:
    return FlexValueError(
        f"{path} does not hold tuning results ({why}); expected a file that `flex-inductor tune export` wrote."
    )
