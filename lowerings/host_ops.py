"""Calls of ops that read values on the host, which a CUDA graph cannot."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from flex_inductor.op.call import QKV, wanted_gradients

from .call import LoweredCall
from .problem import AttentionProblem


def call(op: Any, *args: Any) -> Any:
    """`op(*args)` in Inductor's graph, which then is not captured as a CUDA graph."""
    from torch._inductor.lowering import fallback_handler

    # Inductor looks for the op's tag at the node of its graph, which here is attention's.
    if not V.graph.disable_cudagraphs_reason:
        V.graph.disable_cudagraphs_reason = f"{op} waits for values on the host"
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def lower(
    problem: AttentionProblem, lowered: LoweredCall, forward: Any, backward: Any, tensors: Any, text: str
) -> Any:
    """The results of a call by an op that takes the rest of it as text; `backward` gives the gradients wanted."""
    qkv = (lowered.query, lowered.key, lowered.value)
    if problem.direction == "forward":
        return call(forward.default, *qkv, tensors, text)
    known = (*qkv, lowered.out, lowered.lse, lowered.grad_out, lowered.grad_lse)
    found = iter(call(backward.default, *known, tensors, text))
    d_qkv = [next(found) if name in problem.outputs else None for name in QKV]
    wanted = wanted_gradients(
        lowered.joint and lowered.joint.graph_module, len(lowered.inputs.score_captures)
    )
    return (*d_qkv, tuple(next(found) if want else None for want in wanted))
