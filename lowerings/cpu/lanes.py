"""Mods as the bodies of loops over a tile: Inductor lowers the lane graph and vectorises it.

The tile's coordinates are symbols of the kernel. Lane indices are expressions in them rather than
loaded arrays, so a captured tensor indexed by `kv_idx` is read with vector loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup, ParallelDepth
from torch._inductor.loop_body import LoopBody
from torch._inductor.lowering import fallbacks, lowerings, to_dtype
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.symbol import SymT

from flex_inductor.op.program import LaneProgram
from flex_inductor.op.tracing import INDEX_DTYPE

aten = torch.ops.aten

_names = ("TILE_B", "TILE_H", "TILE_Q", "TILE_KV", "TILE_ROWS", "TILE_COLUMNS")
SYMBOLS = tuple(sympy.Symbol(name, integer=True, nonnegative=True) for name in _names)
_B, _H, _Q, _KV, _ROWS, _COLUMNS = SYMBOLS
_SCORES = "buf_tile_scores"
_LD = sympy.Symbol("TILE_LD", integer=True, positive=True)
# Pointwise at 0-d, though not tagged so.
_ALLOWED = {
    aten.index.Tensor,
    aten.full.default,
    aten.scalar_tensor.default,
    aten._to_copy.default,
    aten.where.ScalarOther,
}


def _to_copy(value: ir.TensorBox, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
    return value if dtype is None else to_dtype(value, dtype)


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
    assert not size, "lanes hold 0-d tensors"
    dtype = torch.tensor(value).dtype if dtype is None else dtype
    return _tile(lambda i: ops.constant(value, dtype), dtype)


# Inductor would broadcast a 0-d value to a tile of unknown size with questions about that size.
_LOWERINGS = {
    aten._to_copy.default: _to_copy,
    aten.full.default: _full,
    aten.scalar_tensor.default: lambda value, **options: _full([], value, **options),
}


def refusal(program: LaneProgram, field: str) -> str | None:
    """Why Inductor cannot inline the program's lane graph, or None if it can."""
    for node in (*program.prologue.graph.nodes, *program.lane.graph.nodes):
        if node.op == "get_attr":
            return f"{field} holds a constant tensor"
    for node in program.prologue.graph.find_nodes(op="output")[0].all_input_nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return f"{field} computes with a size ({node})"
    for node in program.lane.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return f"{field} computes a tensor for each score ({node.target})"
        pointwise = node.target in _ALLOWED or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if (
            not pointwise
            or not (node.target in lowerings or node.target in _LOWERINGS)
            or node.target in fallbacks
        ):
            return f"{field} uses {node.target}, which is not inlined"
    return None


def prologue(program: LaneProgram, captures: Sequence[Any]) -> list[Any]:
    """The program's invariants, as buffers of the surrounding graph."""

    class Lowering(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            return V.graph.call_function(target, args, kwargs)

        def output(self, target, args, kwargs):
            return args[0]

    return [realized(value) for value in Lowering(program.prologue).run(*captures)]


def realized(value: Any) -> Any:
    """`value` as something with an address and fixed strides."""
    value = ir.ExternKernel.realize_input(value)
    ir.as_storage_and_layout(value, freeze=True)
    return ir.TensorBox(value)


class Lanes:
    """One mod of one call: its lane graph, and the tensors that it reads."""

    def __init__(self, program: LaneProgram, captures: Sequence[Any], sizes: dict[str, Any]):
        self.program = program
        self.tensors = [*map(realized, captures), *prologue(program, captures)]
        _drop_needless_guards(program, self.tensors, sizes)

    def inline(self, first: Sequence[Any], live: Any) -> Any:
        """The lane graph over a tile, as a Pointwise. `first` is [score] or []."""
        lowering = PointwiseSubgraphLowering(self.program.lane, V.graph, additional_lowerings=_LOWERINGS)
        with V.set_graph_handler(lowering):
            tensors = [_spread(t) if not t.get_size() else t for t in self.tensors]
            lowering.run(*first, *_indices(), *(live for _ in self.program.guards), *tensors)
        return lowering.graph_outputs[0]


def _drop_needless_guards(program: LaneProgram, tensors: Sequence[Any], sizes: dict[str, Any]) -> None:
    """Where a lane index cannot leave the tensor, neither a guard nor a check is needed.

    `sizes` gives the number of batches, heads, queries and keys by the name of the lane.
    """
    graph = program.lane.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = dict(zip(placeholders[len(placeholders) - len(tensors) :], tensors, strict=True))
    for node in list(graph.nodes):
        if node.target is not aten.index.Tensor or node.args[0] not in named:
            continue
        lanes = [
            index.args[1] if getattr(index, "target", None) is aten.where.ScalarOther else index
            for index in node.args[1]
        ]
        in_range = all(
            isinstance(index, fx.Node)
            and index.op == "placeholder"
            and index.name in sizes
            and V.graph.sizevars.statically_known_leq(sizes[index.name], size)
            for index, size in zip(lanes, named[node.args[0]].get_size(), strict=False)
        )
        if in_range:
            node.target, node.args = aten._unsafe_index.Tensor, (node.args[0], lanes)
    graph.eliminate_dead_code()


def _tile(inner_fn: Callable, dtype: torch.dtype) -> ir.TensorBox:
    return ir.Pointwise.create(
        device=torch.device("cpu"), dtype=dtype, inner_fn=inner_fn, ranges=[_ROWS, _COLUMNS]
    )


def _spread(scalar: ir.TensorBox) -> ir.TensorBox:
    load = scalar.make_loader()
    return _tile(lambda i: load([]), scalar.get_dtype())


def _indices() -> list[ir.TensorBox]:
    """b, h, q_idx, kv_idx of a tile's lanes."""
    of = (lambda i: _B, lambda i: _H, lambda i: _Q + i[0], lambda i: _KV + i[1])
    return [_tile(lambda i, f=f: ops.index_expr(f(i), INDEX_DTYPE), INDEX_DTYPE) for f in of]


def tile_body(score: Lanes | None, mask: Lanes | None) -> ir.TensorBox:
    """What a tile's scores become: the score_mod's value where the mask_mod lets a lane live, else -inf."""
    scores = _tile(lambda i: ops.load(_SCORES, i[0] * _LD + i[1]), torch.float32)
    live = None
    if mask is not None:
        live = mask.inline([], None)
    if score is not None:
        everywhere = _tile(lambda i: ops.constant(True, torch.bool), torch.bool)
        scores = to_dtype(score.inline([scores], everywhere if live is None else live), torch.float32)
    if live is not None:
        scores = lowerings[aten.where.self](
            live, scores, _tile(lambda i: ops.constant(-float("inf"), torch.float32), torch.float32)
        )
    return scores


# What the template has a faster function for.
_FASTER = (
    (r"(at::vec::Vectorized(?:N)?<[^<>]*>)::arange\(", r"progression<\1>("),
    (r"\b(\w+)\.tanh\(\)", r"hyperbolic_tangent(\1)"),
)


def loops(body: ir.TensorBox, args: KernelArgs, names: dict[str, str]) -> str:
    """C++ for a tile body: loops over the tile's rows and columns, vectorised along the columns.

    `names` says what the C++ around calls the buffers that the body reads.
    """
    loader = body.make_loader()
    rows, columns = (sympy_index_symbol_with_prefix(SymT.INDEX, i) for i in range(2))

    def store(index: Sequence[Any], _reduction: Sequence[Any] = ()) -> None:
        ops.store(_SCORES, index[0] * _LD + index[1], loader(index))

    group = KernelGroup()
    group.args = KernelArgs()
    group.args.sizevars = args.sizevars
    group.args.input_buffers.update(names)
    group.args.input_buffers[_SCORES] = group.args.output_buffers[_SCORES] = "scores"
    get_dtype = V.graph.get_dtype
    with (
        patch.object(
            V.graph, "get_dtype", lambda name: torch.float32 if name == _SCORES else get_dtype(name)
        ),
        config.patch({"cpp.enable_tiling_heuristics": False}),
    ):
        ranges = {rows: _ROWS, columns: _COLUMNS}
        loop_body = LoopBody(store, ([rows, columns], ()), ranges, [rows, columns], ())
        proxy = CppKernelProxy(group)
        proxy.codegen_loop_bodies([loop_body], [((_ROWS, _COLUMNS), ())])
        # A tile belongs to one thread.
        with patch.object(proxy.loop_nest, "max_parallel_depth", lambda: ParallelDepth(0, 0)):
            group.finalize_kernel(proxy, [])
    code = group.loops_code.getvalue()
    for slow, fast in _FASTER:
        code = re.sub(slow, fast, code)
    return code
