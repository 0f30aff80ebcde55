"""The last route: a call to the chunked ops, which serve every device, dtype, shape and mod."""

from __future__ import annotations

from typing import Any

import torch

from flex_inductor.op import chunked_ops
from flex_inductor.op.program import split
from flex_inductor.op.tracing import JOINT_LANES, MASK_LANES, SCORE_LANES

from . import host_ops
from .hints import unused_hints
from .problem import AttentionProblem


class ChunkedRoute:
    name = "chunked"

    def available(self) -> tuple[bool, str]:
        return True, "plain torch operations in bounded memory"

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        if problem.options.get("configs"):
            return False, "has no kernel to configure"
        return True, "serves every device, dtype, shape and mod, in bounded memory; not fused"

    def notes(self, problem: AttentionProblem) -> list[str]:
        return unused_hints(problem)

    def lower(self, problem: AttentionProblem, inputs: Any) -> Any:
        call = inputs
        qkv, common, captures = op_arguments(problem, call)
        if problem.direction == "forward":
            return host_ops.call(torch.ops.flex_inductor.chunked_forward.default, *qkv, *common, *captures)
        return self._lower_backward(problem, call, qkv, common, captures, mod_texts(problem)["joint"])

    def _lower_backward(self, problem, call, qkv, common, captures, joint) -> Any:
        wanted = chunked_ops.wanted_gradients(problem.joint, len(call.score_captures))
        grads = host_ops.call(
            torch.ops.flex_inductor.chunked_backward.default,
            *qkv, call.out, call.lse, call.grad_out, call.grad_lse,
            *common, joint, call.options["wants"], wanted, *captures,
        )  # fmt: skip
        found = iter(grads)
        d_qkv = [next(found) if name in call.options["wants"] else None for name in "qkv"]
        return (*d_qkv, tuple(next(found) if want else None for want in wanted))


def mod_texts(problem: AttentionProblem) -> dict[str, str]:
    """The call's graphs as text, empty where there is none."""
    guarded = problem.mask_mod is not None or problem.schedule is not None
    graphs = (
        ("score_mod", problem.score_mod, SCORE_LANES),
        ("mask_mod", problem.mask_mod, MASK_LANES),
        ("joint", problem.joint, JOINT_LANES),
    )
    return {
        name: "" if graph is None else split(graph, lanes, guarded=guarded).to_text()
        for name, graph, lanes in graphs
    }


def op_arguments(problem: AttentionProblem, call: Any) -> tuple[tuple, tuple, tuple]:
    """What the ops that take mods as text are called with: inputs, schedule with mods and scale, captures."""
    texts = mod_texts(problem)
    schedule = (problem.schedule or "", list(problem.blocks or ()), list(call.schedule[2:10]))
    common = (*schedule, texts["score_mod"], texts["mask_mod"], call.scale)
    captures = (list(call.score_captures), list(call.mask_captures))
    return (call.query, call.key, call.value), common, captures
