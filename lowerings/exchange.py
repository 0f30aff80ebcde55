"""Exchanges between ranks in compiled code: they begin as early, and are waited for as late, as what they need allows.

An exchange is lowered like torch's own collectives. So the memory of what is sent is not reused before the wait, and
Inductor's own passes may move the wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.lowering import register_lowering
from torch.utils._ordered_set import OrderedSet

from flex_inductor.fingerprint import FINGERPRINT

aten = torch.ops.aten
SEND = torch.ops.flex_inductor.send_rows.default
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@register_lowering(torch.ops.flex_inductor.send_rows, type_promotion_kind=None)
def _send_rows(rows: Any, *rest: Any) -> Any:
    # Inductor is free to choose the layout of what it computes, `contiguous()` or not.
    rows = ir.ExternKernel.require_contiguous(rows)
    begun: Any = ir._CollectiveKernel.create_out_of_place(SEND, rows, *rest)
    return ir.TensorBox.create(begun)


def patches(given: dict[str, Any]) -> dict[str, Any]:
    """Options of Inductor for a graph with exchanges, beside those that are `given`; what a user has set stays."""
    found: dict[str, Any] = {}
    if not given.get("reorder_for_compute_comm_overlap", config.reorder_for_compute_comm_overlap):
        found["reorder_for_compute_comm_overlap"] = True
        found["reorder_for_compute_comm_overlap_passes"] = ["sink_waits"]
    if given.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass) is None:
        found["post_grad_custom_post_pass"] = _Early()
    return found


class _Early(CustomGraphPass):
    """Move work that an exchange does not need after its begin: the projection of queries after that of keys, say."""

    def __call__(self, graph: fx.Graph) -> None:
        before: list[fx.Node] = []  # since the last collective
        fences: dict[fx.Node, OrderedSet[fx.Node]] = {}
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is SEND:
                later = _not_needed(node, before)
                for other in reversed(later):
                    node.append(other)
                # A kernel fused over both sides would move the products back.
                fences |= {n: OrderedSet([node]) for n in later if n.target in PRODUCTS}
            if node.target is SEND or getattr(node.target, "namespace", "") == "_c10d_functional":
                before = []
            else:
                before.append(node)
        preserve_node_ordering(graph, fences)

    def uuid(self) -> Any:
        return FINGERPRINT


def _not_needed(node: fx.Node, before: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of `before` that `node` does not depend on; none where a tensor is written in place among them."""
    needed = set(node.all_input_nodes)
    later = []
    for other in reversed(list(before)):
        if _writes(other):
            return []
        if other in needed:
            needed.update(other.all_input_nodes)
        else:
            later.append(other)
    return later[::-1]


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
