"""Code written for torch's own flex_attention: served by this project without changing it.

Inside a function compiled with backend="flex_inductor" torch's op nodes are replaced. What torch's
Python wrapper refuses before there is a node (on CPU: gradients and max_scores) needs `take_over()`.
"""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn.attention import flex_attention as torch_flex

from . import compat
from .op import AttentionCall, Inputs, attention
from .op.schedule import BlockLists
from .options import BackendOptions, backend_options, torch_call_options

_LARGE_BLOCK = 1 << 30  # what torch writes for "no block mask"


def replace_torch_nodes(module: fx.GraphModule, options: BackendOptions) -> None:
    """Replace torch's op by ours in a Dynamo graph; put options and its number, if not 0, on each call."""
    graph_modules = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    for graph_module in graph_modules:
        for node in graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.flex_attention
        ):
            _replace(graph_module, node)
    for number, node in enumerate(attention_nodes(module)):
        call = AttentionCall.read(*node.args)
        node.args = call._replace(options=backend_options(call.options, options, number)).wire()
    for graph_module in graph_modules:
        graph_module.recompile()


def attention_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Our op's nodes in a Dynamo graph and the graphs inside it, in the order in which they run."""
    found: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(inner := getattr(module, node.target, None), fx.GraphModule):
            found |= dict.fromkeys(attention_nodes(inner))
        elif node.target is attention:
            found[node] = None
    return list(found)


def _replace(module: fx.GraphModule, node: fx.Node) -> None:
    graph = module.graph
    query, key, value, score_mod, block_mask, scale, options, score_captures, mask_captures = node.args
    schedule: BlockLists | None
    mask_mod: Any
    fields, mask_mod = compat.block_mask_parts(block_mask)
    schedule = BlockLists(*fields)
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


def _attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    from flex_inductor.attention import flex_attention

    return flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


def _block_mask(
    mask_mod,
    B,
    H,
    Q_LEN,
    KV_LEN,
    device=None,
    BLOCK_SIZE=128,
    _compile=False,
    separate_full_blocks=True,
    compute_dq_write_order=False,
    dq_kv_order=True,
):
    from flex_inductor.masks import create_block_mask

    return create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, separate_full_blocks,
        compute_dq_write_order, dq_kv_order,
    )  # fmt: skip


_PAIRS = ((torch_flex.flex_attention, _attention), (torch_flex.create_block_mask, _block_mask))
_SWAPPED = ("__code__", "__defaults__", "__kwdefaults__")


class take_over:
    """Make torch's flex_attention and create_block_mask ours, until `undo()` or the `with` block ends.

    Needed for what torch's wrapper refuses on CPU: gradients and auxiliary outputs. The function objects
    stay torch's and get our code, so modules that have imported them by name are served as well. They are
    torch's again once all that took them over, in whatever threads and order, have let go.
    """

    _lock = threading.Lock()
    _holders: ClassVar[set[take_over]] = set()
    _torchs: ClassVar[list[list[Any]]] = []  # the attributes of torch's functions while they are ours

    def __init__(self) -> None:
        with self._lock:
            if not self._holders:
                self._torchs[:] = [[getattr(torchs, name) for name in _SWAPPED] for torchs, _ in _PAIRS]
                for torchs, ours in _PAIRS:
                    _set(torchs, [getattr(ours, name) for name in _SWAPPED])
            self._holders.add(self)

    def undo(self) -> None:
        """Let go. Once the last has, torch's functions have their own code back."""
        with self._lock:
            if self not in self._holders:
                return
            self._holders.remove(self)
            if not self._holders:
                for (torchs, _), attributes in zip(_PAIRS, self._torchs, strict=True):
                    _set(torchs, attributes)

    def __enter__(self) -> take_over:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def _set(function: Any, attributes: list[Any]) -> None:
    for name, value in zip(_SWAPPED, attributes, strict=True):
        setattr(function, name, value)
