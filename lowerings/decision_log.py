"""Where decisions go: the log, the structured trace, `decisions()`, and the file for other processes."""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import Any

from torch._logging import trace_structured

from flex_inductor.op import AttentionCall

from . import record_file
from .decision import Choice, Decision
from .problem import dtype_name

log = logging.getLogger("flex_inductor")

_recent: deque[Decision] = deque(maxlen=4096)
_made_here: set[str] = set()


def record(decision: Decision, node: str, number: int) -> str:
    """Log a decision made for the graph node `node`, the call of that number in Dynamo's graph.

    Returns a line for the generated code, so that code from a cache brings its decisions with it.
    """
    _tell(decision, number)
    text = json.dumps([node, number, *decision])
    _made_here.add(text)
    return f"from {__name__} import restore; restore({text!r})"


def record_eager(call: Any, why: str) -> None:
    """Log that a call is not compiled."""
    kind = "forward" if isinstance(call, AttentionCall) else "backward"
    batch, heads, queries, dim = call.query.shape
    shape = f"B{batch} H{heads} M{queries} N{call.key.size(2)} D{dim}"
    dtype = dtype_name(call.query.dtype)
    _tell(Decision(f"{kind} {dtype} on {call.query.device.type}, {shape}", "chunked", why, ()), 0)


def record_plan(choice: Any) -> None:
    """Log the method by which masks are planned for a sequence spread over ranks."""
    _tell(Decision(*choice), 0)


def restore(text: str) -> None:
    """Called by generated code when it is loaded: record its decision if it was made in another process."""
    if text in _made_here:
        _made_here.discard(text)
        return
    _, number, call, chosen, why, rejected, notes, kernels = json.loads(text)
    choices = [
        Choice(kernel, config, why, tuple(map(tuple, others)), milliseconds)
        for kernel, config, why, others, milliseconds in kernels
    ]
    _tell(Decision(call, chosen, why, tuple(map(tuple, rejected)), tuple(notes), tuple(choices)), number)


def _tell(decision: Decision, number: int) -> None:
    _recent.append(decision)
    record_file.note(decision, number)
    log.info("%s", decision)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "flex_inductor_decision", "encoding": "string"},
        payload_fn=lambda: str(decision),
    )


def decisions(*, clear: bool = False) -> list[Decision]:
    """Give the decisions of this process: on compiled calls, on eager calls, and on plans of context_parallel.

    Args:
        clear: forget what is returned, so that the next call gives what comes after.

    Returns:
        list: of `Decision`, the last 4096.

    Example:
        >>> query = torch.randn(1, 1, 1024, 24)
        >>> out = flex_attention(query, query, query)
        >>> print(flex_inductor.decisions()[-1])
        call:     forward float32 on cpu, B1 H1 M1024 N1024 D24
        chosen:   chunked (an eager call; its class gets a kernel after 536,870,912 scores)
    """
    found = list(_recent)
    if clear:
        for _ in found:  # decisions that another thread adds meanwhile are for the next call
            _recent.popleft()
    return found
