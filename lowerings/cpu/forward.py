"""The fused forwards on CPUs: for many queries, and for few."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._inductor.virtualized import V

from ..problem import AttentionProblem
from ..subgraphs import realized
from . import lanes, template
from .call import INCLUDES, inlinable, layout_of, scale_text, walks

OUTPUTS = ("out", "lse", "max_scores")


class ForwardConfig(NamedTuple):
    """Sizes that the kernel is rendered with."""

    tile_m: int = 128
    tile_n: int = 128
    sub_m: int = 32
    packed_bytes: int = 8 << 20


class DecodeConfig(NamedTuple):
    """Sizes that the kernel for few queries is rendered with."""

    chunk: int = 64
    split: int = 2048


MOST_DECODE_ROWS = 16


def is_decode(problem: AttentionProblem) -> bool:
    """Whether so few queries read each KV head that packing its keys would not pay."""
    known = V.graph.sizevars.statically_known_leq
    in_one_block = problem.blocks is None or known(problem.M, problem.blocks[0])
    return in_one_block and known(problem.M * problem.H, MOST_DECODE_ROWS * problem.K)


def lower(problem: AttentionProblem, call: Any) -> Any:
    decode = is_decode(problem)
    config: NamedTuple = DecodeConfig() if decode else ForwardConfig()
    mods = inlinable(problem, call)
    score, mask = mods["score_mod"], mods["mask_mod"]
    walked, lists = walks(problem, call, mask is not None)
    tensors = {
        **{name: realized(getattr(call, name)) for name in ("query", "key", "value")},
        **lists,
    }
    bodies = {}
    if score is not None:
        bodies["full_tile"] = lanes.score_stores(score, None)
    if mask is not None:
        bodies["partial_tile"] = lanes.score_stores(score, mask)
    mod_tensors = [tensor for mod in (score, mask) if mod for tensor in mod.tensors]

    def render(kernel: template.TemplateKernel) -> str:
        signature = kernel.signature()
        given = dict(zip(tensors, map(kernel.argument, kernel.tensors[: len(tensors)]), strict=True))
        outputs = {OUTPUTS[i]: kernel.argument(tensor) for i, tensor in kernel.outputs.items()}
        return INCLUDES + template.source("decode.jinja" if decode else "forward.jinja").render(
            **config._asdict(),
            element=template.element_type(kernel.tensors[0]),
            is_bf16=int(problem.dtype == torch.bfloat16),
            signature=signature,
            profile=kernel.maybe_codegen_profile(),
            scale=scale_text(call.scale),
            schedule=problem.schedule,
            blocks=problem.blocks,
            lane_symbols=lanes.SYMBOL_NAMES,
            bodies={name: lanes.loops(stores, kernel) for name, stores in bodies.items()},
            walks=walked,
            lists={name: given[name] for name in lists},
            query=given["query"],
            key=given["key"],
            value=given["value"],
            outputs=outputs,
            heads_share_lists=all(lists[walk.counts].get_size()[1] == 1 for walk in walked),
        )

    layouts = [layout_of(fake) for fake in V.graph.current_node.meta["val"]]
    return template.add_node(render, [*tensors.values(), *mod_tensors], layouts)
