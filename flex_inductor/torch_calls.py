"""Calls of torch's own op in a Dynamo graph, as calls of ours."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from . import compat
from .op import AttentionCall, Inputs, attention
from .options import torch_call_options
from .visits import BlockRuns

_LARGE_BLOCK = 1 << 30  # torch's value for "no block mask"


def replace_torch_calls(module: fx.GraphModule) -> None:
    """Replace torch's op by ours in a Dynamo graph and the graphs inside it."""
    graph_modules = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    for graph_module in graph_modules:
        for node in graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.flex_attention
        ):
            _replace(graph_module, node)


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    graph = module.graph
    query, key, value, score_mod, block_mask, scale, options, score_captures, mask_captures = node.args
    schedule: BlockRuns | None
    mask_mod: Any
    fields, mask_mod = compat.block_mask_parts(block_mask)
    schedule = BlockRuns.of(fields[:2], fields[2:], of_one=True)
    if schedule[:2] == (_LARGE_BLOCK, _LARGE_BLOCK):
        schedule, mask_mod, mask_captures = None, None, ()
    if _is_identity(module.get_submodule(score_mod.target)):
        score_mod = None
    inputs = Inputs(tuple(score_captures), tuple(mask_captures), schedule)
    call = AttentionCall(query, key, value, score_mod, mask_mod, scale, inputs, torch_call_options(options))
    with graph.inserting_before(node):
        ours = graph.call_function(attention, call.wire())
        ours.meta = dict(node.meta)
        out, lse, max_scores = (graph.call_function(_item, (ours, i)) for i in range(3))
        # torch's op gives these two in log2, and its wrapper converts them afterwards.
        in_log2 = [graph.call_function(torch.mul, (stat, 1 / math.log(2))) for stat in (lse, max_scores)]
    results = (out, *in_log2)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _is_identity(score_mod: fx.GraphModule) -> bool:
    """Torch's wrapper writes one where no score_mod was given."""
    nodes = list(score_mod.graph.nodes)
    return nodes[-1].args[0] in (nodes[0], (nodes[0],))


def _item(values: tuple, index: int) -> Any:
    return values[index]
