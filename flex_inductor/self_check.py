"""The check of a torch newer than those tested, before it is used: a small call each way, with its gradients."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor

from . import errors, supported
from .attention import flex_attention
from .op.eager.kernels import set_eager_kernels

_lock = threading.RLock()
_found: dict[str, BaseException | None] = {}  # the failure of each way


def self_check(way: str) -> None:
    """Raise where a call made this way, "eager" or "compiled", does not give what dense attention does."""
    with _lock:
        if way not in _found:
            _found[way] = None  # the check's own call passes
            _found[way] = _failure(way)
        failure = _found[way]
    if failure is not None:
        raise errors.FlexRuntimeError(
            supported.refused(f"the self-check of {way} calls", failure)
        ) from failure


def _failure(way: str) -> BaseException | None:
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            _compare(way)
    except Exception as error:
        return error
    return None


def _compare(way: str) -> None:
    query, key, value = (torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])

    ours = attend
    if way == "compiled":  # by the route that needs no kernel of its own
        ours = torch.compile(attend, backend="flex_inductor", fullgraph=True, options={"route": "chunked"})
    before = set_eager_kernels("never")
    try:
        with _backward_compiled_at_once() if way == "compiled" else contextlib.nullcontext():
            found = ours(query, key, value, bias)
    finally:
        set_eager_kernels(before)
    wanted = (query @ key.transpose(-1, -2) / 8**0.5 + bias).softmax(-1) @ value
    inputs = (query, key, value, bias)
    for got, want in zip(
        (found, *torch.autograd.grad(found.sin().sum(), inputs)),
        (wanted, *torch.autograd.grad(wanted.sin().sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def _backward_compiled_at_once() -> Any:
    """The check runs while the user's graph is compiled. torch itself compiles no backward then."""
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True)
