"""Mods as the bodies of loops over a tile: Inductor lowers the lane graph and vectorises it.

The tile's coordinates are symbols of the kernel. Lane indices are expressions in them rather than
loaded arrays, so a captured tensor indexed by `kv_idx` is read with vector loads.

Buffers that the C++ around a body holds, rows TILE_LD apart where they have lanes:
  raw            scores before score_mod
  scores         scores after it, -inf where a lane is not live
  grads          gradient of the score after score_mod, then before it
  leaf_i_lanes   what each lane adds to a captured tensor's gradient
  leaf_i         that gradient
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup, ParallelDepth
from torch._inductor.loop_body import LoopBody
from torch._inductor.lowering import index_impl_helper, lowerings, to_dtype
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.symbol import SymT

from flex_inductor.mod_ir.arguments import INDEX_DTYPE
from flex_inductor.mod_ir.program import LaneProgram

from .. import mods
from ..mods import realized
from .index_ranges import in_range
from .template import TemplateKernel

aten = torch.ops.aten

SYMBOL_NAMES = ("TILE_B", "TILE_H", "TILE_Q", "TILE_KV", "TILE_ROWS", "TILE_COLUMNS")
_B, _H, _Q, _KV, _ROWS, _COLUMNS = (sympy.Symbol(n, integer=True, nonnegative=True) for n in SYMBOL_NAMES)
_LD = sympy.Symbol("TILE_LD", integer=True, positive=True)
_PREFIX = "buf_tile_"


def _to_copy(value: ir.TensorBox, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
    return value if dtype is None else to_dtype(value, dtype)


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
    assert not size, "lanes hold 0-d tensors"
    dtype = torch.tensor(value).dtype if dtype is None else dtype
    return _tile(lambda i: ops.constant(value, dtype), dtype)


def _index_in_range(value: ir.TensorBox, indices: Sequence[ir.TensorBox]) -> ir.TensorBox:
    size, inner_fn, _ = index_impl_helper(value, indices, check=False, wrap_neg=False)
    return ir.Pointwise.create(
        device=value.get_device(), dtype=value.get_dtype(), inner_fn=inner_fn, ranges=size
    )


# Inductor would broadcast a 0-d value to a tile of unknown size with questions about that size.
_LOWERINGS: dict[Any, Callable] = {
    aten._to_copy.default: _to_copy,
    aten.full.default: _full,
    aten.scalar_tensor.default: lambda value, **options: _full([], value, **options),
    aten.zeros_like.default: lambda value, **_: _full([], 0, dtype=value.get_dtype()),
    aten._unsafe_index.Tensor: _index_in_range,
}


def refusal(program: LaneProgram, field: str) -> str | None:
    """Why the program cannot be inlined, or None if it can."""
    for node in _graph(program.lane).find_nodes(op="placeholder"):
        if node.users and not isinstance(node.meta.get("val"), (torch.Tensor, type(None))):
            return f"{field} computes with a size ({node})"
    return mods.refusal(program, field, _LOWERINGS)


def _graph(part: Any) -> fx.Graph:
    return part.graph


class Lanes:
    """One mod of one call: its lane graph, and the tensors that it reads."""

    def __init__(self, program: LaneProgram, captures: Sequence[Any], sizes: dict[str, Any]):
        self.program = program
        self.captures = [*map(realized, captures)]
        self.invariants = mods.invariants(program, self.captures)
        self.sizes = sizes
        self._drop_needless_guards()

    @property
    def tensors(self) -> list[Any]:
        return [t for t in (*self.captures, *self.invariants) if isinstance(t, ir.IRNode)]

    @property
    def leaf_sizes(self) -> list[list[Any]]:
        """The shape of each leaf."""
        return [
            [
                self.invariants[size] if known_late else sympy.Integer(size)
                for size, known_late in zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            ]
            for leaf in self.program.leaves
        ]

    def inline(self, live: Any) -> list[Any]:
        """The lane graph over a tile, as Pointwise values, one for each of its outputs."""
        lowering = PointwiseSubgraphLowering(self.program.lane, V.graph, additional_lowerings=_LOWERINGS)
        given = {
            "score": lambda: _lanes_of("raw"),
            "grad_score": lambda: _lanes_of("grads"),
            "b": lambda: _index(lambda i: _B),
            "h": lambda: _index(lambda i: _H),
            "q_idx": lambda: _index(lambda i: _Q + i[0]),
            "kv_idx": lambda: _index(lambda i: _KV + i[1]),
        }
        with V.set_graph_handler(lowering):
            fixed = [
                _spread(t) if isinstance(t, ir.IRNode) and not t.get_size() else t
                for t in (*self.captures, *self.invariants)
            ]
            lanes = [given[name]() for name in self.program.lanes]
            lowering.run(*lanes, *(live for _ in self.program.guards), *fixed)
        return list(lowering.graph_outputs)

    def gradients(self, sums: Sequence[Any]) -> list[Any]:
        """The gradient of each capture from the sums of the leaves, in the surrounding graph."""
        gradients = mods.run_outside(self.program.epilogue, [*sums, *self.captures, *self.invariants])
        return [
            None if gradient is None else _as_gradient(gradient, capture)
            for gradient, capture in zip(gradients, self.captures, strict=True)
        ]

    def index_in_range(self, output: int, size: Any) -> bool:
        """Whether this output of the lane graph, an index, stays below `size` whatever the lane."""
        (outputs,) = _graph(self.program.lane).find_nodes(op="output")[0].args
        return in_range(outputs[output], size, self.sizes)

    def leaves_keep_heads_apart(self) -> bool:
        """Whether no two heads ever add to the same place of a leaf: each has the head itself for an index."""
        (outputs,) = _graph(self.program.lane).find_nodes(op="output")[0].args
        position, apart = 1, True
        for leaf in self.program.leaves:
            indices = outputs[position + 1 : position + 1 + leaf.indices]
            apart &= any(index.op == "placeholder" and index.name == "h" for index in indices)
            position += 1 + leaf.indices
        return apart

    def _drop_needless_guards(self) -> None:
        """Where an index cannot leave the tensor, neither a guard nor a check is needed."""
        graph = _graph(self.program.lane)
        tensors = (*self.captures, *self.invariants)
        placeholders = graph.find_nodes(op="placeholder")
        named = dict(zip(placeholders[len(placeholders) - len(tensors) :], tensors, strict=True))
        for node in list(graph.nodes):
            if node.target is not aten.index.Tensor or node.args[0] not in named:
                continue
            indices = [
                index.args[1] if getattr(index, "target", None) is aten.where.ScalarOther else index
                for index in node.args[1]
            ]
            lengths = named[node.args[0]].get_size()
            if all(in_range(i, n, self.sizes) for i, n in zip(indices, lengths, strict=False)):
                node.target, node.args = aten._unsafe_index.Tensor, (node.args[0], indices)
        graph.eliminate_dead_code()


def _as_gradient(gradient: Any, capture: Any) -> Any:
    gradient = to_dtype(gradient, capture.get_dtype())
    return lowerings[aten.clone.default](lowerings[aten.expand.default](gradient, capture.get_size()))


def _tile(inner_fn: Callable, dtype: torch.dtype) -> ir.TensorBox:
    return ir.Pointwise.create(
        device=torch.device("cpu"), dtype=dtype, inner_fn=inner_fn, ranges=[_ROWS, _COLUMNS]
    )


def _lane_at(i: Sequence[Any]) -> sympy.Expr:
    return i[0] * _LD + i[1]


def _lanes_of(buffer: str, at: Callable = _lane_at) -> ir.TensorBox:
    return _tile(lambda i: ops.load(_PREFIX + buffer, at(i)), torch.float32)


def _spread(scalar: Any) -> ir.TensorBox:
    load = scalar.make_loader()
    return _tile(lambda i: load([]), scalar.get_dtype())


def _index(coordinate: Callable) -> ir.TensorBox:
    return _tile(lambda i: ops.index_expr(coordinate(i), INDEX_DTYPE), INDEX_DTYPE)


def _constant(value: float | bool, dtype: torch.dtype) -> ir.TensorBox:
    return _tile(lambda i: ops.constant(value, dtype), dtype)


def _where(live: Any, value: ir.TensorBox, otherwise: float) -> ir.TensorBox:
    value = to_dtype(value, torch.float32)
    if live is None:
        return value
    return lowerings[aten.where.self](live, value, _constant(otherwise, torch.float32))


class Store(NamedTuple):
    """One statement of a body: for each (row, column), `buffer[address] = value`, or += where it adds."""

    buffer: str
    value: Callable[[Sequence[Any]], Any]
    address: Callable[[Sequence[Any]], Any] = _lane_at
    adds: bool = False


def _live(mask: Lanes | None) -> Any:
    return None if mask is None else mask.inline(None)[0]


def _everywhere(live: Any) -> Any:
    return _constant(True, torch.bool) if live is None else live


def score_stores(score: Lanes | None, mask: Lanes | None) -> list[Store]:
    """What scores become: the score_mod's value where the mask_mod lets a lane live, else -inf."""
    live = _live(mask)
    scores = _lanes_of("raw") if score is None else score.inline(_everywhere(live))[0]
    return [Store("scores", _where(live, scores, -float("inf")).make_loader())]


def gradient_stores(joint: Lanes, mask: Lanes | None) -> list[Store]:
    """The gradient of raw scores, and what each lane adds to the leaves; 0 where a lane is not live."""
    live = _live(mask)
    outputs = joint.inline(_everywhere(live))
    values, position = [("grads", outputs[0])], 1
    for i, leaf in enumerate(joint.program.leaves):
        values.append((f"leaf_{i}_lanes", outputs[position]))
        position += 1 + leaf.indices
    return [Store(buffer, _where(live, value, 0.0).make_loader()) for buffer, value in values]


class Scatter(NamedTuple):
    """How a leaf's lanes reach it: summed along the tile's rows or columns first where its index allows."""

    over_rows: bool  # one sum for each column
    over_columns: bool  # one sum for each row
    store: Store


def scatters(joint: Lanes) -> list[Scatter]:
    position, result = 1, []
    for i, (leaf, sizes) in enumerate(zip(joint.program.leaves, joint.leaf_sizes, strict=True)):
        over_rows, over_columns = "q_idx" not in leaf.axes, "kv_idx" not in leaf.axes
        summed_at = _summed_at(over_rows, over_columns)
        result.append(Scatter(over_rows, over_columns, _scatter(joint, i, position + 1, sizes, summed_at)))
        position += 1 + leaf.indices
    return result


def _summed_at(over_rows: bool, over_columns: bool) -> Callable:
    """Where a lane's sum is kept."""
    if over_columns:
        return lambda i: sympy.S.Zero if over_rows else i[0]
    return (lambda i: i[1]) if over_rows else _lane_at


def _scatter(joint: Lanes, leaf: int, first: int, sizes: Sequence[Any], at: Callable) -> Store:
    buffer = f"leaf_{leaf}_lanes"
    value = _lanes_of(buffer, at)
    # A lane that adds nothing may hold any index.
    adds = lowerings[aten.ne.Scalar](value, 0.0)
    indices = joint.inline(adds)[first : first + len(sizes)]
    parts: list[tuple[Callable, Any, bool]] = []
    for position, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        safe = joint.index_in_range(first + position, size)
        if not safe:
            index = lowerings[aten.where.self](adds, index, _zero_like(index))
        parts.append((index.make_loader(), size, safe))

    def address(i: Sequence[Any]) -> sympy.Expr:
        flat = sympy.S.Zero
        for load, size, safe in parts:
            flat = flat * size + ops.indirect_indexing(load(i), size, check=not safe, wrap_neg=not safe)
        return flat

    return Store(f"leaf_{leaf}", value.make_loader(), address, adds=True)


def _zero_like(value: ir.TensorBox) -> ir.TensorBox:
    return _constant(0, value.get_dtype())


# What the template has a faster function for.
_FASTER = (
    (r"(at::vec::Vectorized(?:N)?<[^<>]*>)::arange\(", r"progression<\1>("),
    (r"\b(\w+)\.tanh\(\)", r"hyperbolic_tangent(\1)"),
)


def loops(stores: Sequence[Store], kernel: TemplateKernel, *, row: bool = True, column: bool = True) -> str:
    """C++ for a body: loops over the tile's rows and columns, vectorised along the columns.

    Without `row` or `column` there is just one of them. Then the other is the vectorised dimension.
    """
    inner_is_row = row and not column
    first, second = (sympy_index_symbol_with_prefix(SymT.INDEX, i) for i in range(2))
    lengths = [_ROWS if row else sympy.S.One, _COLUMNS if column else sympy.S.One]
    if inner_is_row:
        lengths.reverse()

    def run(index: Sequence[Any], _reduction: Sequence[Any] = ()) -> None:
        at = list(reversed(index)) if inner_is_row else list(index)
        # All is read before anything is written.
        values = [store.value(at) for store in stores]
        for store, value in zip(stores, values, strict=True):
            ops.store(_PREFIX + store.buffer, store.address(at), value, "atomic_add" if store.adds else None)

    get_dtype = V.graph.get_dtype
    of_tile = lambda name: torch.float32 if name.startswith(_PREFIX) else get_dtype(name)  # noqa: E731
    # A tile belongs to one thread: no parallel loops, and plain additions for scatters.
    one_thread = {"cpp.threads": 1, "cpp.dynamic_threads": False, "cpp.enable_tiling_heuristics": False}
    with patch.object(V.graph, "get_dtype", of_tile), config.patch(one_thread):
        group = KernelGroup()
        group.args = KernelArgs()
        group.args.sizevars = kernel.args.sizevars
        group.args.input_buffers.update(kernel.names)
        for name in _buffer_names(stores):
            group.args.input_buffers[_PREFIX + name] = group.args.output_buffers[_PREFIX + name] = name
        ranges = dict(zip((first, second), lengths, strict=True))
        body = LoopBody(run, ([first, second], ()), ranges, [first, second], ())
        proxy = CppKernelProxy(group)
        proxy.codegen_loop_bodies([body], [(tuple(lengths), ())])
        with patch.object(proxy.loop_nest, "max_parallel_depth", lambda: ParallelDepth(0, 0)):
            group.finalize_kernel(proxy, [])
    code = group.loops_code.getvalue()
    for slow, fast in _FASTER:
        code = re.sub(slow, fast, code)
    return code


def _buffer_names(stores: Sequence[Store]) -> set[str]:
    names = {"raw", "scores", "grads", *(store.buffer for store in stores)}
    return names | {f"{name}_lanes" for name in names if name.startswith("leaf_") and name[-1].isdigit()}
