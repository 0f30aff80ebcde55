"""How an eager call runs: torch operations in chunks, or a kernel that is compiled for its class.

A kernel takes seconds to compile. By default a class of calls gets one when it has computed ENOUGH scores in chunks,
which takes about as long; `set_eager_kernels` says otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import errors, upward
from ...kept import Kept
from ..call import AttentionCall, BackwardCall, class_of, tensors_of
from ..prepare import lift_captures, prepare, with_score_graph
from . import known

ENOUGH = 1 << 29  # some 7 s of forwards in chunks on two cores, where a forward and a backward compile in 15
SCORES_A_TILE = 1 << 18  # scores in as much time: chunks take a map's tiles one by one, some 4 ms each
LEAST = 1 << 20  # scores of a call: finding the class of a smaller one takes longer than the call

log = logging.getLogger("flex_inductor")

_MODES = ("auto", "always", "never")
_mode = "auto"
_computed: Kept[float] = Kept(1024)  # scores, by class
_FAILED = -math.inf  # whatever is added, the class has not computed enough


def set_eager_kernels(mode: str) -> str:
    """Say whether eager calls run kernels that are compiled for them, for the whole process.

    `flex_inductor.decisions()` says how a call ran.

    Args:
        mode: "auto" compiles a class of calls once it has computed many scores, "always" any call at once, and "never"
            none.

    Returns:
        str: what was set before; "auto" at first.

    Raises:
        FlexValueError: `mode` is none of the three.

    Example:
        >>> before = flex_inductor.set_eager_kernels("never")
        >>> flex_inductor.set_eager_kernels(before)  # gives what was set meanwhile
        'never'
    """
    global _mode
    if mode not in _MODES:
        raise errors.bad_argument("set_eager_kernels: mode", f"one of {', '.join(_MODES)}", repr(mode))
    before, _mode = _mode, mode
    known.forget()
    return before


def run(call: AttentionCall | BackwardCall, chunked: Callable[[], Any]) -> Any:
    """The results of the call."""
    tensors = tensors_of(call)
    if not _may_compile(call, tensors):
        return chunked()
    own = call._replace(options=call.options._replace(eager=True))
    key = class_of(own)
    scores = _scores_of(call)
    computed = _computed.change(key, lambda before: (before or 0) + scores)
    if _mode == "auto" and computed < ENOUGH:
        if computed == scores:
            why = f"an eager call; its class gets a kernel after {ENOUGH:,} scores"
            upward.record_eager(call, why)
        return chunked()
    try:
        run_compiled = upward.compiled(own, key)
    except Exception as error:
        if _mode == "always":
            raise
        if isinstance(error, errors.TooManyKernels):
            return chunked()
        _computed.put(key, _FAILED)
        log.warning("an eager call's kernel could not be made, it goes on in chunks: %s", error)
        return chunked()
    return run_compiled()


def chosen_for(call: AttentionCall) -> tuple[Callable[[Sequence[Tensor]], Any], AttentionCall]:
    """A function that chooses the kernel for tensors of calls like this one, and the call as kernels get it."""
    call = with_score_graph(prepare(lift_captures(call)))
    call = call._replace(options=call.options._replace(eager=True))
    return upward.kernels_of(call), call


def _may_compile(call: AttentionCall | BackwardCall, tensors: list[Tensor]) -> bool:
    if _mode == "never":
        return False
    scores = _scores_of(call)
    if scores == 0 or (_mode == "auto" and scores < LEAST):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _scores_of(call: AttentionCall | BackwardCall) -> int:
    batch, heads, queries, _ = call.query.shape
    scores = batch * heads * queries * call.key.size(2)
    tile_map = call.inputs.tile_map
    return scores if tile_map is None else max(scores, SCORES_A_TILE * tile_map.queries.size(0))
