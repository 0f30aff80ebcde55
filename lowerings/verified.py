"""The option `verify`: the ops of flex_inductor.verify check a route's results as it runs."""

from __future__ import annotations

from typing import Any

import torch

from flex_inductor.verify import check  # noqa: F401 - defines the ops

from . import host_ops
from .buffers import results_read
from .call import LoweredCall
from .chunked import op_arguments
from .problem import AttentionProblem


def verified(problem: AttentionProblem, call: LoweredCall, outputs: Any) -> Any:
    """`outputs`, through an op that raises where they are wrong."""

    def checked(op: Any, *args: Any) -> Any:
        return host_ops.call(op, *qkv, tensors, text, _code(problem), *args)

    qkv, text, tensors = op_arguments(problem, call)
    if problem.direction == "forward":
        out, *rows = outputs
        names = ("lse", "max_scores", *problem.options.more)
        read = [i for i in range(len(rows)) if i + 1 in results_read()]
        of_rows = [rows[i] for i in read], [names[i] for i in read]
        return checked(torch.ops.flex_inductor.verified_forward.default, out, *of_rows), *rows
    *d_qkv, d_captures = outputs
    grads = [grad for grad in (*d_qkv, *d_captures) if grad is not None]
    given = (call.out, call.lse, call.grad_out, call.grad_lse)
    found = iter(checked(torch.ops.flex_inductor.verified_backward.default, *given, grads))
    d_qkv = [None if grad is None else next(found) for grad in d_qkv]
    return (*d_qkv, tuple(None if grad is None else next(found) for grad in d_captures))


def _code(problem: AttentionProblem) -> str:
    """The code of the mods that kernels inline."""
    texts = []
    for name, program in zip(("score_mod", "mask_mod", "joint"), problem.programs, strict=True):
        if program is not None:
            lane: Any = program.lane
            texts.append(lane.code.strip().replace("def forward(self, ", f"def {name}("))
    return "\n".join(texts)
