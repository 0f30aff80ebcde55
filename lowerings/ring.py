"""The route of calls whose keys arrive around a ring of ranks: an op that runs a kernel of its class at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.virtualized import V

from flex_inductor.op.eager import chunked

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

        graphs = {
            name: graph.graph_module
            for name in ("score_mod", "mask_mod", "joint")
            if (graph := getattr(call, name)) is not None
        }
        given: Any = call.inputs.ring
        # With dynamic=True Dynamo may take the rank for a size. Every rank compiles for itself.
        rank = V.graph.sizevars.guard_int(given.rank)
        inputs = call.inputs._replace(ring=given._replace(rank=rank))
        text, tensors = ring.dump(replace(call, inputs=inputs, **graphs))
        ops = torch.ops.flex_inductor
        return host_ops.lower(problem, call, ops.ring_forward, ops.ring_backward, tensors, text), ()
