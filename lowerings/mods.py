"""Lane programs and Inductor: what can be inlined, and the parts that run outside the kernel."""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import fallbacks, lowerings, to_dtype
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering, SubgraphLoweringException
from torch._inductor.virtualized import V, ops

from flex_inductor.mod_ir.program import LaneProgram

aten = torch.ops.aten

# Pointwise at 0-d, though not tagged so.
_ALSO_POINTWISE = {
    aten.index.Tensor,
    aten.full.default,
    aten.scalar_tensor.default,
    aten._to_copy.default,
    aten.where.ScalarOther,
    aten.zeros_like.default,
}


def refusal(program: LaneProgram, field: str, own_lowerings: Container[Any]) -> str | None:
    """Why the program's lane graph cannot be inlined, or None if it can."""
    prologue, lane, epilogue = (_graph(part) for part in (program.prologue, program.lane, program.epilogue))
    for node in (*prologue.nodes, *lane.nodes, *epilogue.nodes):
        if node.op == "get_attr":
            return f"{field} holds a constant tensor"
    for node in lane.nodes:
        value = node.meta.get("val")
        if node.op != "call_function":
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return f"{field} computes a tensor for each score ({node.target})"
        pointwise = node.target in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
        known = node.target in lowerings or node.target in own_lowerings
        if not pointwise or not known or node.target in fallbacks:
            return f"{field} uses {node.target}, which is not inlined"
        if node.target not in own_lowerings and not _inlines(node, lane):
            dtypes = ", ".join(str(n.meta["val"].dtype).removeprefix("torch.") for n in node.all_input_nodes)
            return f"{field} uses {node.target} of {dtypes}, which is not inlined"
    return None


def _inlines(node: fx.Node, lane: fx.Graph) -> bool:
    """Whether Inductor's lowering of an op of numbers is pointwise for these dtypes too: a power of integers is not."""
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in inputs):
        return True

    def stand_in(source: fx.Node) -> Any:
        value = source.meta["val"]
        return ir.Pointwise.create(
            device=value.device,
            dtype=value.dtype,
            inner_fn=lambda _: ops.constant(0, value.dtype),
            ranges=[],
        )

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), stand_in)
    try:
        with V.set_graph_handler(PointwiseSubgraphLowering(lane.owning_module, V.graph)):
            lowerings[node.target](*args, **kwargs)
    except SubgraphLoweringException:  # it wants a buffer
        return False
    return True


def _graph(part: Any) -> fx.Graph:
    return part.graph


def with_reciprocals(program: LaneProgram) -> LaneProgram:
    """Scores and their gradients times a number's reciprocal where the mod divides by it: one more rounding.

    What is made of indices alone is still divided: it may be meant to come out whole.
    """
    lane = copy.deepcopy(program.lane)
    placeholders = _graph(lane).find_nodes(op="placeholder")
    scored = {
        node
        for name, node in zip(program.lanes, placeholders, strict=False)
        if name in ("score", "grad_score")
    }
    for node in _graph(lane).nodes:
        if not scored & {*node.all_input_nodes}:
            continue
        scored.add(node)
        if node.target not in (aten.div.Tensor, aten.div.Scalar) or node.kwargs:
            continue
        divided, by = node.args
        kept = divided.meta.get("val", node.meta["val"]).dtype == torch.float32
        if kept and isinstance(by, int | float) and by and math.isfinite(1 / by):
            node.target, node.args = aten.mul.Tensor, (divided, 1 / by)
    return program._replace(lane=lane)


def realized(value: Any) -> Any:
    """`value` as something with an address and fixed strides."""
    value = ir.ExternKernel.realize_input(value)
    ir.as_storage_and_layout(value, freeze=True)
    return ir.TensorBox(value)


def run_outside(part: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Lower a prologue or an epilogue, ordinary tensor code, into the surrounding graph."""
    return _Outside(part).run(*inputs)


def invariants(program: LaneProgram, captures: Sequence[Any]) -> list[Any]:
    """What the program's prologue computes: buffers of the surrounding graph, and sizes."""
    return [
        realized(value) if isinstance(value, ir.TensorBox) else value
        for value in run_outside(program.prologue, captures)
    ]


class _Outside(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.sym_size.int:
            return args[0].get_size()[args[1]]
        if target is aten._to_copy.default:  # Inductor decomposes it before it lowers a graph of its own
            dtype = kwargs.get("dtype")
            return args[0] if dtype is None else to_dtype(args[0], dtype)
        if isinstance(target, torch._ops.OpOverload):
            return V.graph.call_function(target, args, kwargs)
        return target(*args, **kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0]
