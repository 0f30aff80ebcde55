"""Masks are ordinary tensors, whatever mode or transform is around.

Made under inference mode, they also serve training. Made inside a transform, such as torch.func.grad, they are data
that no transform follows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .. import compat
from .errors import made_of_examples

P = ParamSpec("P")
R = TypeVar("R")


def ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run outside of inference mode and of transforms."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # In a trace the mode does not matter, and an export would record leaving it as a node.
        if torch.compiler.is_dynamo_compiling() or compat.is_exporting():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad(), _outside_transforms():
            return function(*args, **kwargs)

    # Where Dynamo gave up the whole function, it would compile frames inside.
    compat.compile_no_frame_of(run, calls=True)
    return run


@contextlib.contextmanager
def _outside_transforms() -> Iterator[None]:
    if _functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack(), _Values():
        yield


def without_gradient_levels(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func.grad, vjp and jvp."""
    while _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


_DESCRIBE = (
    Tensor.dim,
    Tensor.size,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_nested")),
)


class _Values(TorchFunctionMode):
    """Passes torch functions the values of a transform's tensors: closures bring such tensors in unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id: the tensor, which stays alive, and its value

    def value_of(self, tensor: Tensor) -> Tensor:
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return tensor
        if id(tensor) not in self.known:
            value = without_gradient_levels(tensor)
            if _functorch.is_functionaltensor(value):
                torch._sync(value)
                value = _functorch._unwrap_functional_tensor(value, False)
            if _functorch.is_batchedtensor(value):
                if _functorch.peek_interpreter_stack() is not None:
                    return tensor  # of a vmap that evaluates a mask
                raise made_of_examples()
            self.known[id(tensor)] = (tensor, value)
        return self.known[id(tensor)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DESCRIBE:
            return func(*args, **kwargs or {})
        given, named = tree_map_only(Tensor, self.value_of, (args, kwargs or {}))
        return func(*given, **named)
