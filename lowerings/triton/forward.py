"""The fused forward: the output, the logsumexp and the maximum, by one kernel or, for few queries, two."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from flex_inductor.op.eager.chunked import NOTHING

from ..buffers import results_read
from ..call import LoweredCall
from ..decision import Choice
from ..lanes import Mods, mods, programs
from ..problem import AttentionProblem
from . import decode
from .fitting import chosen
from .kernel_builder import Builder, further, softmax_values, unwritten, walked


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[tuple[Any, ...], list[Choice]]:
    names = ("out", "lse", "max_scores", *problem.options.more)
    fakes = dict(zip(names, V.graph.current_node.meta["val"], strict=True))
    outputs = {name: unwritten(problem, fake, fake.dtype, NOTHING[name]) for name, fake in fakes.items()}
    read = {0, *results_read()}
    written = {name: output if i in read else None for i, (name, output) in enumerate(outputs.items())}
    few = decode.serves(problem)
    choices = (decode.lower if few else _lower)(problem, call, mods(programs(problem), call.inputs), written)
    return tuple(outputs.values()), choices


def _lower(problem: AttentionProblem, call: LoweredCall, mods: Mods, outputs: dict[str, Any]) -> list[Choice]:
    builder = Builder(problem, call, mods, ("b", "h", "q_idx"))
    batches, queries, _ = walked(problem)
    inlined = builder.inline()
    values = softmax_values(builder, inlined) | builder.written(outputs) | {"more": further(outputs)}
    launched = builder.launch(queries, problem.H, batches, "m")
    values["walks"] = builder.walks("keys")
    return builder.add("forward.jinja", chosen(problem, "forward", inlined.counts), values, launched)
