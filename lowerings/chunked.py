"""The last route: it calls the chunked ops, which serve every device, dtype, shape and mod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flex_inductor.mod_ir.split import Programs, with_guards
from flex_inductor.op import call_text
from flex_inductor.op.eager import chunked
from flex_inductor.options import CallOptions

from . import host_ops
from .call import LoweredCall
from .decision import Choice
from .hints import unused_hints, unused_splits, wide_indices
from .problem import AttentionProblem


class ChunkedRoute:
    name = "chunked"
    serves = frozenset(chunked.SERVES)
    forms = None

    def available(self) -> tuple[bool, str]:
        return True, "plain torch operations in bounded memory"

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        if problem.options.configs:
            return False, "has no kernel to configure"
        return True, "serves every device, dtype, shape and mod, in bounded memory; not fused"

    def notes(self, problem: AttentionProblem) -> list[str]:
        return [*wide_indices(problem), *unused_hints(problem), *unused_splits(problem, decodes=False)]

    def lower(self, problem: AttentionProblem, call: LoweredCall) -> tuple[Any, Sequence[Choice]]:
        _, text, tensors = op_arguments(problem, call)
        ops = torch.ops.flex_inductor
        return host_ops.lower(problem, call, ops.chunked_forward, ops.chunked_backward, tensors, text), ()


def op_arguments(problem: AttentionProblem, call: LoweredCall) -> tuple[tuple, str, list[Any]]:
    """Arguments of the ops that take a call as text: query, key and value, the text, and its tensors."""
    mods = problem.programs
    if problem.programs.mask is not None or problem.schedule is not None:
        mods = Programs(*(program and with_guards(program) for program in mods))
    wants = problem.outputs if problem.direction == "backward" else ()
    options = CallOptions(more=problem.options.more)
    text, tensors = call_text.dump(call.inputs, mods, float(call.scale), wants, options)
    return (call.query, call.key, call.value), text, tensors
