"""Traces a mod, hidden from everything around it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)
from torch.utils._python_dispatch import _disable_current_modes

from . import errors


@contextlib.contextmanager
def apart_from_surrounding_trace() -> Iterator[None]:
    """Hides what runs inside from a surrounding trace, functionalization, modes, functorch and autocast."""
    with (
        suspend_functionalization(),
        _disable_current_modes(),
        _without_tracers_functions(),
        _plain_saved_tensors(),
        _plain_backward(),
        temporarily_clear_interpreter_stack(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
        torch.inference_mode(False),
    ):
        yield


@contextlib.contextmanager
def _without_tracers_functions() -> Iterator[None]:
    """Takes away the torch function modes of an export, which would record switches of autograd and autocast."""
    with contextlib.ExitStack() as stack:
        modes = [stack.enter_context(_pop_mode_temporarily()) for _ in range(_len_torch_function_stack())]
        for mode in reversed(modes):
            if not _is_tracers(mode):
                stack.enter_context(mode)
        yield


def function_modes() -> list[TorchFunctionMode]:
    """The surrounding modes, such as a default device, without an export's."""
    return [mode for mode in _get_current_function_mode_stack() if not _is_tracers(mode)]


@contextlib.contextmanager
def inside(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Push those of `modes` that are popped. A mode is popped while it handles a call."""
    present = _get_current_function_mode_stack()
    away = [mode for mode in modes if not any(mode is other for other in present)]
    for mode in away:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in away:
            _pop_mode()


def _is_tracers(mode: TorchFunctionMode) -> bool:
    return type(mode).__module__.startswith(("torch.fx.", "torch._export."))


def _plain_saved_tensors() -> Any:
    """Autograd saves tensors itself, not by the hooks of a checkpoint. Under torch.func.grad there are none."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return saved_tensors_hooks(_packed, _unpacked)


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    """The saved value, or an error if it has been changed in place since, as autograd does without hooks."""
    tensor, version = packed
    if tensor._version != version:
        raise errors.value_overwritten()
    return tensor


def _plain_backward() -> Any:
    """Keeps compiled autograd from compiling the derivative of a mod."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    # The setting is for the whole process, and other threads would see it change. So it is left alone if it is off.
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return contextlib.nullcontext()
    return compiled_autograd._disable()
