"""The errors of the tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flex_inductor.errors import FlexRuntimeError, FlexValueError


def no_attention_call(name: str) -> FlexValueError:
    return FlexValueError(
        f"{name} never calls flex_attention with these arguments: there is nothing to inspect."
    )


def raised_while_tracing(message: str, at: str) -> FlexValueError:
    return FlexValueError(f"The function raises: {message}{at}")


def not_one_graph(reason: str, at: str) -> FlexValueError:
    return FlexValueError(
        f"The function does not compile as one graph: {reason}{at}. Inspect the part that calls attention."
    )


def mixed_devices(devices: Sequence[str]) -> FlexValueError:
    return FlexValueError(
        f"The arguments are on several devices: {', '.join(devices)}. Move them to one; a GPU that is the target "
        f"need not be there, so that CPU tensors serve."
    )


def not_this_device(target: str, own: str) -> FlexValueError:
    return FlexValueError(
        f"The arguments are on a device of architecture {own}, and target is {target!r}. Give CPU tensors to inspect "
        f"for another device."
    )


def no_triton(target: str, reason: str) -> FlexRuntimeError:
    return FlexRuntimeError(f"Kernels for {target} are compiled by triton: {reason}.")


def no_record(folder: Any) -> FlexValueError:
    return FlexValueError(
        f"there is no record in {folder}: no process with this cache folder has compiled attention. Run your program "
        "first, with the same TORCHINDUCTOR_CACHE_DIR if it sets one."
    )


def not_a_record(path: Any, why: Exception) -> FlexValueError:
    return FlexValueError(
        f"{path} cannot be read ({why}); it is written anew by the next process that compiles attention."
    )


def no_interpreter(command: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"interpret.run needs TRITON_INTERPRET=1 set before triton is imported, which it was not. "
        f"Run the script with: {command}"
    )


def interpreter_bf16(version: str, error: float) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"A kernel multiplies bfloat16 matrices, which the interpreter of triton {version} gets wrong (off by "
        f"{error:.3g} where the product is exact). Use float16 or float32 inputs with interpret.run."
    )
