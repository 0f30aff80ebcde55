"""The fused forward: one kernel for the output, the logsumexp and the maximum."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from ..problem import AttentionProblem
from .build import LOG2_E, Builder, layout_of, mods, tiles
from .kernel import KernelCall, empty, realized

OUTPUTS = ("out", "lse", "max_scores")


def lower(problem: AttentionProblem, call: Any) -> tuple[Any, ...]:
    outputs = [
        empty(*layout_of(fake), fake.dtype, problem.device) for fake in V.graph.current_node.meta["val"]
    ]
    builder = Builder(problem, call, mods(problem, call), ("b", "h", "q_idx"))
    scale = float(call.scale)
    score_mod, mask_mod = builder.inline("score"), builder.inline("mask")
    # A negative factor would turn the row's maximum into its minimum.
    scaled = score_mod is not None or scale <= 0
    inputs = {name: builder.tensor(name, realized(getattr(call, name))) for name in ("query", "key", "value")}
    used = _used_outputs()
    written = {
        name: builder.tensor(name, output, written=True) if name in used else None
        for name, output in zip(OUTPUTS, outputs, strict=True)
    }
    values = {
        **builder.common(),
        **inputs,
        **written,
        "walks": builder.walks(call.schedule[2:6], "keys"),
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "hoisted": builder.hoisted,
        "scaled": scaled,
        "scale": repr(scale),
        "to_log2": repr(LOG2_E if scaled else LOG2_E * scale),
        "to_natural": repr(1.0 if scaled else scale),
    }
    configs = builder.configs("forward")
    KernelCall(
        "forward",
        lambda name: builder.render("forward.jinja", name, configs, values),
        builder.arguments,
        configs,
        lambda config: (tiles(problem.M, config.block_m), problem.H, problem.B),
    )
    return tuple(outputs)


def _used_outputs() -> set[str]:
    """The output, and what else the graph reads."""
    taken = {user.args[1] for user in V.graph.current_node.users if len(user.args) > 1}
    return {"out", *(name for i, name in enumerate(OUTPUTS) if i in taken)}
