"""Which way an eager call goes: torch operations in chunks, or a kernel that is compiled for its class.

A kernel takes seconds to compile. By default a class of calls gets one at its CALLS-th call with as many scores as
make that worth while; `set_eager_kernels` says otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import errors, upward
from .call import AttentionCall, BackwardCall, class_of, tensors_of

CALLS = 8
MOST_CLASSES = 1024  # that are counted
SCORES = 1 << 22  # some 0.1 s in chunks on one core

log = logging.getLogger("flex_inductor")

_MODES = ("auto", "always", "never")
_mode = "auto"
_lock = threading.Lock()
_calls: dict[Any, int] = {}  # of each class
_failed: set[Any] = set()


def set_eager_kernels(mode: str) -> str:
    """Whether eager calls run kernels compiled for them, for the whole process; returns what was set before.

    "auto" compiles a class of large calls once it has been called some times, "always" any call at once, and "never"
    none. The way that a call went is in `flex_inductor.decisions()`.
    """
    global _mode
    if mode not in _MODES:
        raise errors.bad_option("set_eager_kernels", "mode", mode, f"one of {', '.join(_MODES)}")
    before, _mode = _mode, mode
    return before


def run(call: AttentionCall | BackwardCall, chunked: Callable[[], Any]) -> Any:
    """What the call gives."""
    if not _may_compile(call):
        return chunked()
    key = class_of(call)
    with _lock:
        number = _calls[key] = _calls.pop(key, 0) + 1
        if len(_calls) > MOST_CLASSES:
            del _calls[next(iter(_calls))]  # the one that was called longest ago
    if key in _failed or (_mode == "auto" and number < CALLS):
        if number == 1:
            why = f"an eager call; its class gets a kernel at call {CALLS}"
            upward.record_eager(call, why)
        return chunked()
    options = call.options._replace(eager=True)
    try:
        return upward.compiled(call._replace(options=options))(tensors_of(call))
    except Exception as error:
        if _mode == "always":
            raise
        _failed.add(key)
        log.warning("an eager call's kernel could not be made, it goes on in chunks: %s", error)
        return chunked()


def _may_compile(call: AttentionCall | BackwardCall) -> bool:
    if _mode == "never":
        return False
    batch, heads, queries, _ = call.query.shape
    scores = batch * heads * queries * call.key.size(2)
    if scores == 0 or (_mode == "auto" and scores < SCORES):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors_of(call))
