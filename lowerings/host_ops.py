"""Calls of ops that read values on the host, which a CUDA graph cannot."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V


def call(op: Any, *args: Any) -> Any:
    """`op(*args)` in Inductor's graph, which then is not captured as a CUDA graph."""
    from torch._inductor.lowering import fallback_handler

    # Inductor looks for the op's tag at the node of its graph, which here is attention's.
    if not V.graph.disable_cudagraphs_reason:
        V.graph.disable_cudagraphs_reason = f"{op} waits for values on the host"
    return fallback_handler(op, add_to_fallback_set=False)(*args)
