"""The fused forwards on CPUs: for many queries, and for few."""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from ..buffers import realized
from ..call import LoweredCall
from ..decision import Choice
from ..hints import splits_asked
from ..problem import AttentionProblem
from . import lanes, template
from .call import add_node, fixed_layout, inlinable, rendered, tiles, visited

PACKED_BYTES = 8 << 20  # bytes of keys and values in use at a time
MOST_DECODE_ROWS = 16


def is_decode(problem: AttentionProblem) -> bool:
    """Whether so few queries read each KV head that packing its keys would not pay.

    A map does not say how many tiles of queries read a key. Blocks for few queries are taken to mean one.
    """
    if "dropout" in problem.inputs:  # the kernel for few queries has no dropout
        return False
    known = V.graph.sizevars.statically_known_leq
    queries = problem.M
    if problem.blocks is not None and "tile_map" in problem.inputs:
        queries = problem.blocks[0]
    in_one_block = problem.blocks is None or known(queries, problem.blocks[0])
    return in_one_block and known(queries * problem.H, MOST_DECODE_ROWS * problem.K)


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[Any, list[Choice]]:
    name = "decode" if is_decode(problem) else "forward"
    score, mask, _ = inlinable(problem, call)
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
            packed_bytes=PACKED_BYTES,
            splits=splits_asked(problem),
            walks=walked,
            heads_share_lists=problem.heads_alike,
        )

    layouts = [fixed_layout(fake) for fake in V.graph.current_node.meta["val"]]
    results, choice = add_node(name, problem, render, tensors, mod_tensors, layouts)
    return results, [choice]
