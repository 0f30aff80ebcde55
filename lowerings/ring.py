"""The route of calls whose keys arrive around a ring of ranks: an op that runs a kernel of its class at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flex_inductor.op import chunked
from flex_inductor.op.call import QKV, wanted_gradients

from . import host_ops
from .call import LoweredCall
from .decision import Choice
from .hints import unused_hints
from .problem import AttentionProblem


class RingRoute:
    name = "ring"
    serves = frozenset((*chunked.SERVES, "ring"))
    forms = frozenset(("lists", "runs"))

    def available(self) -> tuple[bool, str]:
        return torch.distributed.is_available(), "blocks of keys travel between ranks"

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        return self.available()

    def notes(self, problem: AttentionProblem) -> list[str]:
        return unused_hints(problem)

    def lower(self, problem: AttentionProblem, call: LoweredCall) -> tuple[Any, Sequence[Choice]]:
        from flex_inductor.distributed import ring

        qkv = (call.query, call.key, call.value)
        graphs = {
            name: graph.graph_module
            for name in ("score_mod", "mask_mod", "joint")
            if (graph := getattr(call, name)) is not None
        }
        text, tensors = ring.dump(replace(call, **graphs))
        if problem.direction == "forward":
            return host_ops.call(torch.ops.flex_inductor.ring_forward.default, *qkv, tensors, text), ()
        grads = iter(
            host_ops.call(
                torch.ops.flex_inductor.ring_backward.default,
                *qkv, call.out, call.lse, call.grad_out, call.grad_lse, tensors, text,
            )
        )  # fmt: skip
        d_qkv = [next(grads) if name in problem.outputs else None for name in QKV]
        wanted = wanted_gradients(graphs.get("joint"), len(call.inputs.score_captures))
        return (*d_qkv, tuple(next(grads) if want else None for want in wanted)), ()
