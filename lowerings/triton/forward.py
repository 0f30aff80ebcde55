"""The fused forward: the output, the logsumexp and the maximum, by one kernel or, for few queries, two."""

from __future__ import annotations

import math
from typing import Any

from torch._inductor.virtualized import V

from ..call import LoweredCall
from ..decision import Choice
from ..lanes import Mods, mods, programs
from ..problem import AttentionProblem
from . import decode
from .fitting import chosen
from .kernel_builder import Builder, softmax_values, unwritten, walked

OUTPUTS = ("out", "lse", "max_scores")


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[tuple[Any, ...], list[Choice]]:
    fakes = dict(zip(OUTPUTS, V.graph.current_node.meta["val"], strict=True))
    outputs = {
        name: unwritten(problem, fake, fake.dtype, 0.0 if name == "out" else -math.inf)
        for name, fake in fakes.items()
    }
    used = _used_outputs()
    read = {name: output if name in used else None for name, output in outputs.items()}
    few = decode.serves(problem)
    choices = (decode.lower if few else _lower)(problem, call, mods(programs(problem), call.inputs), read)
    return tuple(outputs.values()), choices


def _lower(problem: AttentionProblem, call: LoweredCall, mods: Mods, outputs: dict[str, Any]) -> list[Choice]:
    builder = Builder(problem, mods, ("b", "h", "q_idx"), call.inputs.tile_map)
    batches, queries, _ = walked(problem)
    inlined = builder.inline()
    values = softmax_values(builder, call, inlined)
    values |= {
        name: None if output is None else builder.tensor(name, output, written=True)
        for name, output in outputs.items()
    }
    launched = builder.launch_tiles(queries, "m", problem.H, batches)
    values["walks"] = builder.walks(call, "keys")
    return builder.call("forward.jinja", chosen(problem, "forward", inlined.counts), values, launched)


def _used_outputs() -> set[str]:
    """The output, and the other results that the graph reads."""
    taken = {user.args[1] for user in V.graph.current_node.users if len(user.args) > 1}
    return {"out", *(name for i, name in enumerate(OUTPUTS) if i in taken)}
