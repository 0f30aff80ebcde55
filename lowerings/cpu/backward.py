"""The fused backward on CPUs: gradients of query, key and value, and of what score_mod captures."""

from __future__ import annotations

from typing import Any

from torch._inductor.lowering import full_like
from torch._inductor.virtualized import V

from ..buffers import realized
from ..call import LoweredCall
from ..decision import Choice
from ..problem import AttentionProblem
from . import lanes, template
from .call import (
    add_node,
    fixed_layout,
    fp32_layout,
    inlinable,
    rendered,
    scaled_late,
    tiles,
    visited,
)
from .differences import coordinate

PARTS = 8  # at least this many work items, if there are as many rows of tiles
ITEMS_OF_PART = 8  # rows of tiles of a sequence that several parts share
LEAF_BYTES = 64 << 20  # bytes of separate sums of captured gradients


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[Any, list[Choice]]:
    score, mask, joint = inlinable(problem, call, scaled=False)
    walked, lists = visited(call, mask is not None)
    tensors = {name: realized(getattr(call, name)) for name in ("query", "key", "value", "out", "lse")}
    tensors["grad_out"] = realized(full_like(call.out, 0) if call.grad_out is None else call.grad_out)
    if call.grad_lse is not None:
        tensors["grad_lse"] = realized(call.grad_lse)
    for name in ("dropout", "grad_entropy"):
        if (given := getattr(call.inputs, name)) is not None:
            tensors[name] = realized(given)
    tensors |= lists | tiles(call)

    bodies, scatters, leaf_sizes = {}, [], []
    adds_gradients = joint is not None and lanes.adds_gradients(joint)
    if score is not None:
        bodies["full_scores"] = lanes.body(lanes.score_stores, score, None)
    if mask is not None:
        bodies["partial_scores"] = lanes.body(lanes.score_stores, score, mask)
    if joint is not None:
        scatters, leaf_sizes = lanes.scatters(joint), joint.mod.leaf_sizes
    if joint is not None and not adds_gradients:
        bodies["full_gradients"] = lanes.body(lanes.gradient_stores, joint, None)
        if mask is not None:
            bodies["partial_gradients"] = lanes.body(lanes.gradient_stores, joint, mask)
    wanted = [f"d_{name}" for name in problem.outputs]
    names = [*wanted, *(f"leaf_{i}_sum" for i in range(len(scatters)))]
    mod_tensors = [tensor for mod in (score, mask, joint) if mod for tensor in mod.tensors]

    def render(config: Any, kernel: template.TemplateKernel) -> str:
        return rendered(
            "backward.jinja",
            kernel,
            problem,
            call,
            tensors,
            names,
            lists,
            bodies,
            **config._asdict(),
            parts=PARTS,
            items_of_part=ITEMS_OF_PART,
            leaf_bytes=LEAF_BYTES,
            scaled_late=scaled_late(score, call),
            scatters=[
                {
                    "over_rows": scatter.over_rows,
                    "over_columns": scatter.over_columns,
                    "over_diagonals": scatter.over_diagonals,
                    "summed": scatter.summed,
                    "size": " * ".join(["int64_t(1)", *map(kernel.text, sizes)]),
                    "code": lanes.code(
                        scatter.body,
                        kernel,
                        row=not (scatter.over_rows or scatter.over_diagonals),
                        column=not scatter.over_columns,
                    ),
                }
                for scatter, sizes in zip(scatters, leaf_sizes, strict=True)
            ],
            adds_gradients=adds_gradients,
            reads_score=joint is not None and bool(coordinate(joint.mod.program, "score").users),
            walks=walked,
            # With a map, mods see other heads than the tensors have.
            leaves_by_head=joint is not None
            and call.inputs.tile_map is None
            and all("h" in own for own in joint.mod.own_indices),
        )

    fakes = [fake for fake in V.graph.current_node.meta["val"][:3] if fake is not None]
    layouts = [fixed_layout(fake) for fake in fakes]
    layouts += [fp32_layout(sizes) for sizes in leaf_sizes]
    results, choice = add_node("backward", problem, render, tensors, mod_tensors, layouts)
    found = dict(zip(wanted, results, strict=False))
    d_captures = (
        joint.mod.gradients(results[len(wanted) :]) if joint else [None] * len(call.inputs.score_captures)
    )
    return (*(found.get(f"d_{name}") for name in ("query", "key", "value")), tuple(d_captures)), [choice]
