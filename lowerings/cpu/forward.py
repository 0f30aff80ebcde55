"""The fused forwards on CPUs: for many queries, and for few."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from flex_inductor.op.call import has_few_queries

from ..buffers import realized
from ..call import LoweredCall
from ..decision import Choice
from ..hints import splits_asked
from ..problem import AttentionProblem
from . import lanes, template
from .call import add_node, fixed_layout, inlinable, rendered, scaled_late, tiles, visited
from .tables import has_slow_lanes

PACKED_BYTES = 8 << 20  # bytes of keys and values in use at a time


def is_decode(problem: AttentionProblem) -> bool:
    sizes = problem.M, problem.H, problem.K
    q_block = problem.blocks and problem.blocks[0]
    return has_few_queries(*sizes, q_block, problem.inputs, V.graph.sizevars.statically_known_leq)


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[Any, list[Choice]]:
    name = "decode" if is_decode(problem) else "forward"
    score, mask, _ = inlinable(problem, call, scaled=name == "decode")
    walked, lists = visited(call, mask is not None)
    tensors = {
        **{name: realized(getattr(call, name)) for name in ("query", "key", "value")},
        **{
            name: realized(given)
            for name in ("sinks", "dropout")
            if (given := getattr(call.inputs, name)) is not None
        },
        **dict(zip(("key_scale", "value_scale"), map(realized, call.inputs.kv_scales), strict=False)),
        **lists,
        **tiles(call),
    }
    bodies = {}
    if score is not None:
        bodies["full_tile"] = lanes.body(lanes.score_stores, score, None)
    if mask is not None:
        bodies["partial_tile"] = lanes.body(lanes.score_stores, score, mask)
    mod_tensors = [tensor for mod in (score, mask) if mod for tensor in mod.tensors]

    def render(config: Any, kernel: template.TemplateKernel) -> str:
        return rendered(
            f"{name}.jinja",
            kernel,
            problem,
            call,
            tensors,
            ("out", "lse", "max_scores", *problem.options.more),
            lists,
            bodies,
            **config._asdict(),
            scaled_late=scaled_late(score, call),
            slow_scores=score is not None and has_slow_lanes(score.mod),
            packed_bytes=PACKED_BYTES,
            splits=splits_asked(problem),
            walks=walked,
            heads_share_lists=problem.heads_alike,
        )

    layouts = [fixed_layout(fake) for fake in V.graph.current_node.meta["val"]]
    results, choice = add_node(name, problem, render, tensors, mod_tensors, layouts)
    return results, [choice]
