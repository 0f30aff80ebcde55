"""The fused forward: the output, the logsumexp and the maximum, by one kernel or, for few queries, two."""

from __future__ import annotations

import math
from typing import Any

from torch._inductor.virtualized import V

from ..lanes import Mods, mods, programs
from ..problem import AttentionProblem
from . import decode, persistent
from .configs import Config, axes_of
from .kernel import KernelCall
from .kernel_builder import Builder, softmax_values, tiles, unwritten, walked

OUTPUTS = ("out", "lse", "max_scores")


def lower(problem: AttentionProblem, call: Any) -> tuple[Any, ...]:
    fakes = dict(zip(OUTPUTS, V.graph.current_node.meta["val"], strict=True))
    outputs = {
        name: unwritten(problem, fake, fake.dtype, 0.0 if name == "out" else -math.inf)
        for name, fake in fakes.items()
    }
    used = _used_outputs()
    read = {name: output if name in used else None for name, output in outputs.items()}
    few = decode.serves(problem)
    (decode.lower if few else _lower)(problem, call, mods(programs(problem), call.inputs), read)
    return tuple(outputs.values())


def _lower(problem: AttentionProblem, call: Any, mods: Mods, outputs: dict[str, Any]) -> None:
    builder = Builder(problem, mods, ("b", "h", "q_idx"), call.inputs.tile_map)
    batches, queries, _ = walked(problem)
    values = softmax_values(builder, call)
    values |= {
        name: None if output is None else builder.tensor(name, output, written=True)
        for name, output in outputs.items()
    }
    values["launch"] = launch = builder.launch(
        f"tl.cdiv({builder.size(queries)}, BLOCK_M)", problem.H, batches
    )
    values["walks"] = builder.walks(call, "keys")
    configs = builder.configs("forward")
    counted, before = "persistent" in axes_of(configs), None
    if counted:
        more, before = persistent.values(builder, call, values["walks"], configs)
        values |= more

    def grid(config: Config) -> tuple[Any, ...]:
        if config.persistent:
            return (persistent.instances(problem), 1, 1)
        return launch.grid(tiles(queries, config.block_m), problem.H, batches)

    KernelCall(
        "forward",
        lambda name: builder.render("forward.jinja", name, configs, values),
        builder.arguments,
        configs,
        builder.axes,
        grid,
        accumulated=["taken"] if counted else (),
        spare=builder.spare,
        before=before,
    )


def _used_outputs() -> set[str]:
    """The output, and what else the graph reads."""
    taken = {user.args[1] for user in V.graph.current_node.users if len(user.args) > 1}
    return {"out", *(name for i, name in enumerate(OUTPUTS) if i in taken)}
