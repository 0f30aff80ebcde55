"""Mods as the bodies of loops over a tile: Inductor lowers the lane graph and vectorises it.

The tile's coordinates are symbols of the kernel. Indices are expressions in them, not
arrays, so a captured tensor indexed by `kv_idx` is read with vector loads.

Buffers that the C++ around a body holds, rows TILE_LD apart where they have lanes:
  raw            scores before score_mod
  scores         scores after it, -inf where a lane is not live
  grads          gradient of the score after score_mod, then before it
  leaf_i_lanes   what each lane adds to a captured tensor's gradient
  leaf_i         that gradient
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import sympy
import torch
from torch import fx
from torch._inductor import config, ir
from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup, ParallelDepth
from torch._inductor.loop_body import LoopBody
from torch._inductor.lowering import index_impl_helper, lowerings, to_dtype
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.symbol import SymT

from flex_inductor.compat import checks_what_it_computed
from flex_inductor.mod_ir.arguments import INDEX_DTYPE
from flex_inductor.mod_ir.program import LaneProgram
from flex_inductor.mod_ir.ranges import Range, all_known

from .. import lanes
from ..lanes import LaneLowering, Mod, conversions, graph
from . import differences
from .index_ranges import LONGEST, NoMore, bounds_of, may_wrap, needed, shortened
from .side_by_side import with_one_access
from .template import NamedSizes, TemplateKernel

aten = torch.ops.aten

SYMBOL_NAMES = ("TILE_B", "TILE_H", "TILE_Q", "TILE_KV", "TILE_ROWS", "TILE_COLUMNS")
_B, _H, _Q, _KV, _ROWS, _COLUMNS = (sympy.Symbol(n, integer=True, nonnegative=True) for n in SYMBOL_NAMES)
_Q_MAPPED = sympy.Symbol("TILE_Q", integer=True)  # negative where a sequence has more queries than keys
_LD = sympy.Symbol("TILE_LD", integer=True, positive=True)
_PREFIX = "buf_tile_"


def _tile(inner_fn: Callable, dtype: torch.dtype) -> ir.TensorBox:
    return ir.Pointwise.create(
        device=torch.device("cpu"), dtype=dtype, inner_fn=inner_fn, ranges=[_ROWS, _COLUMNS]
    )


def _constant(value: float | bool, dtype: torch.dtype) -> ir.TensorBox:
    return _tile(lambda i: ops.constant(value, dtype), dtype)


def _index_in_range(value: ir.TensorBox, indices: Sequence[ir.TensorBox]) -> ir.TensorBox:
    size, inner_fn, _ = index_impl_helper(value, indices, check=False, wrap_neg=False)
    return ir.Pointwise.create(
        device=value.get_device(), dtype=value.get_dtype(), inner_fn=inner_fn, ranges=size
    )


def _remainder(value: ir.TensorBox, divisor: Any) -> ir.TensorBox:
    """Vectors may reach beyond the tile, where a divisor may be 0: C++ would raise."""
    if _is_integer(divisor):
        rows, columns = (_tile(_is_before(at, end), torch.bool) for at, end in enumerate((_ROWS, _COLUMNS)))
        inside, one = lowerings[aten.logical_and](rows, columns), _constant(1, divisor.get_dtype())
        divisor = lowerings[aten.where.self](inside, divisor, one)
    return lowerings[aten.remainder.Tensor](value, divisor)


def _quotient(value: ir.TensorBox, divisor: Any, rounding_mode: str | None = None) -> ir.TensorBox:
    """C++ would end the process where it divides an integer by 0."""
    if rounding_mode == "trunc" and _is_integer(divisor):
        is_0 = to_dtype(lowerings[aten.eq.Scalar](divisor, 0), divisor.get_dtype())
        divisor = lowerings[aten.bitwise_or](divisor, is_0)
    return lowerings[aten.div.Tensor_mode](value, divisor, rounding_mode=rounding_mode)


def _compared(op: Any) -> Callable:
    """Integers of 8 bits as longer ones: vectors of theirs hold more numbers than there are lanes."""

    def longer(value: Any) -> Any:
        short = isinstance(value, ir.TensorBox) and value.get_dtype() in (torch.int8, torch.uint8)
        return to_dtype(value, torch.int32) if short else value

    return lambda left, right: lowerings[op](longer(left), longer(right))


def _as_bool(value: ir.TensorBox) -> ir.TensorBox:
    """By a comparison: ATen converts one lane at a time."""
    return value if value.get_dtype() == torch.bool else _compared(aten.ne.Scalar)(value, 0)


def _of_bools(op: Any) -> Callable:
    return lambda *values: lowerings[op](*map(_as_bool, values))


def _is_integer(value: Any) -> bool:
    return isinstance(value, ir.TensorBox) and not value.get_dtype().is_floating_point


def _is_before(at: int, end: sympy.Symbol) -> Callable:
    return lambda i: ops.lt(ops.index_expr(i[at], INDEX_DTYPE), ops.index_expr(end, INDEX_DTYPE))


_CONVERSIONS = conversions(_constant)


def _to_copy(value: ir.TensorBox, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
    return _as_bool(value) if dtype == torch.bool else _CONVERSIONS[aten._to_copy.default](value, dtype=dtype)


_COMPARISONS = [
    getattr(getattr(aten, sign), operand)
    for sign in ("eq", "ne", "lt", "le", "gt", "ge")
    for operand in ("Scalar", "Tensor")
]
_OF_BOOLS = [getattr(aten, f"logical_{name}").default for name in ("and", "or", "xor", "not")]
_LOWERINGS: dict[Any, Callable] = {
    **_CONVERSIONS,
    aten._to_copy.default: _to_copy,
    **{op: _compared(op) for op in _COMPARISONS},
    **{op: _of_bools(op) for op in _OF_BOOLS},
    aten.isnan.default: lambda value: lowerings[aten.ne.Tensor](value, value),
    aten.isinf.default: lambda value: lowerings[aten.eq.Scalar](lowerings[aten.abs](value), math.inf),
    aten._unsafe_index.Tensor: _index_in_range,
    aten.remainder.Tensor: _remainder,
    aten.div.Tensor_mode: _quotient,
}


def refusal(program: LaneProgram) -> str | None:
    """Why the program cannot be inlined, or None if it can."""
    for node in graph(program.lane).find_nodes(op="placeholder"):
        if node.users and not isinstance(node.meta.get("val"), (torch.Tensor, type(None))):
            return f"computes with a size ({node})"
    return lanes.refusal(program, _LOWERINGS)


_MAPPED = Range(sympy.S.Zero, sympy.Integer(2**30 - 1))  # what positions in a map are taken for
_BOUNDS_IN_TILE = {
    "b": Range(_B, _B),
    "h": Range(_H, _H),
    "q_idx": Range(_Q_MAPPED, _Q_MAPPED + _ROWS - 1),
    "kv_idx": Range(_KV, _KV + _COLUMNS - 1),
}


class Lanes:
    """One mod of one call, on the lanes of a tile.

    With a map, indices are known tile by tile: `in_tile` is the mod for tiles in which `needed` holds, so that no index
    leaves a tensor.
    """

    def __init__(self, mod: Mod, sizes: dict[str, Any], of_tile: bool = False):
        """`sizes` are the numbers of batches, heads, queries and keys by the name of the lane; none with a map."""
        self.mod, self.sizes, self.of_tile = mod, sizes, of_tile
        self.bounds = bounds_of(sizes)
        self.needed: set[NoMore] = set()
        self.in_tile: Lanes | None = None
        if of_tile:
            self.bounds = _BOUNDS_IN_TILE
        elif not sizes:
            lane = copy.deepcopy(mod.program.lane)
            self.in_tile = Lanes(mod._replace(program=mod.program._replace(lane=lane)), sizes, of_tile=True)
        self._drop_needless_guards()
        self._wrap_around()

    @property
    def tensors(self) -> list[Any]:
        return [t for t in self.mod.inputs if isinstance(t, ir.IRNode)]

    def inline(self, live: Any, over_diagonals: bool = False) -> list[Any]:
        """The lane graph over a tile, as Pointwise values, one for each of its outputs.

        Over diagonals there is one row, of the differences of key and query in ascending order: that of the tile's last
        query, with keys beyond the tile's.
        """
        row = (lambda i: _ROWS - 1) if over_diagonals else (lambda i: i[0])
        given = {
            "score": lambda: _lanes_of("raw"),
            "grad_score": lambda: _lanes_of("grads"),
            "b": lambda: _index(lambda i: _B),
            "h": lambda: _index(lambda i: _H),
            "q_idx": lambda: _index(lambda i: (_Q if self.sizes else _Q_MAPPED) + row(i)),
            "kv_idx": lambda: _index(lambda i: _KV + i[1]),
        }
        program = self.mod.program
        fixed = [_spread(t) if isinstance(t, ir.IRNode) and not t.get_size() else t for t in self.mod.inputs]
        coordinates = [given[name]() for name in program.lanes]
        return LaneLowering(program, _LOWERINGS).outputs(
            *coordinates, *(live for _ in program.guards), *fixed
        )

    def conditions(self, indices: Sequence[Any], sizes: Sequence[Any]) -> set[NoMore] | None:
        """The conditions for `indices`, nodes of the lane graph, to lie within `sizes` in every lane; None if
        unknown."""
        found = all_known(self._needed(index, size) for index, size in zip(indices, sizes, strict=False))
        if found is None or (any(found) and not self.of_tile):
            return None
        return set().union(*found)

    def _needed(self, index: Any, size: Any) -> set[NoMore] | None:
        """The conditions for an index to lie within `size`. Of a few lengths, all its values are computed."""
        found = needed(index, size, self.bounds)
        if found == set() or not self.sizes or not isinstance(index, fx.Node):
            return found
        lengths = differences.static(self.sizes["q_idx"], self.sizes["kv_idx"], size)
        if lengths is None:
            return found
        values = differences.evaluated(self.mod.program, index, *lengths[:2])
        return set() if values and values[0] >= 0 and values[1] < lengths[2] else found

    def _drop_needless_guards(self) -> None:
        """An index that cannot leave the tensor needs neither guard nor check."""
        lane, named = graph(self.mod.program.lane), self.mod.named
        for node in list(lane.nodes):
            if node.target is not aten.index.Tensor or node.args[0] not in named:
                continue
            indices = [
                index.args[1] if getattr(index, "target", None) is aten.where.ScalarOther else index
                for index in node.args[1]
            ]
            lengths = named[node.args[0]].get_size()
            conditions = self.conditions(indices, lengths)
            if conditions is not None:
                self.needed |= conditions
                node.target, node.args = aten._unsafe_index.Tensor, (node.args[0], indices)
        lane.eliminate_dead_code()

    def _wrap_around(self) -> None:
        """Inductor computes with indices as exact integers, up to the first operation that it cannot.

        Conversions are no such operation: it would leave them out.
        """
        lane = graph(self.mod.program.lane)
        bounds = self.bounds if self.sizes else dict.fromkeys(_BOUNDS_IN_TILE, _MAPPED)
        for node in list(lane.nodes):
            for index in shortened(node, bounds):
                node.replace_input_with(index, _computed(index))
            if may_wrap(node, bounds):
                wrapped = _computed(node)
                node.replace_all_uses_with(wrapped, lambda user, wrapped=wrapped: user is not wrapped)


def _computed(index: fx.Node) -> fx.Node:
    """The same number, by an operation that is no expression of indices."""
    with index.graph.inserting_after(index):
        made = index.graph.call_function(aten.bitwise_or.Scalar, (index, 0))
    made.meta["val"] = index.meta["val"]
    return made


def _lane_at(i: Sequence[Any]) -> sympy.Expr:
    return i[0] * _LD + i[1]


def _lanes_of(buffer: str, at: Callable = _lane_at) -> ir.TensorBox:
    return _tile(lambda i: ops.load(_PREFIX + buffer, at(i)), torch.float32)


def _spread(scalar: Any) -> ir.TensorBox:
    load = scalar.make_loader()
    return _tile(lambda i: load([]), scalar.get_dtype())


def _index(coordinate: Callable) -> ir.TensorBox:
    return _tile(lambda i: ops.index_expr(coordinate(i), INDEX_DTYPE), INDEX_DTYPE)


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
    room: Any = None  # how many numbers the buffer has, where that is not a tile's


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
    leaves = joint.mod.program.by_leaf(outputs)
    values = [("grads", outputs[0]), *((f"leaf_{i}_lanes", value) for i, (_, value, _) in enumerate(leaves))]
    return [Store(buffer, _where(live, value, 0.0).make_loader()) for buffer, value in values]


def adds_gradients(joint: Lanes) -> bool:
    """Whether all that the joint graph gives is the gradient that it is given, as where a bias is added to the score.

    Then tiles hold these gradients already.
    """
    outputs = joint.mod.outputs
    values = [outputs[0], *(value for _, value, _ in joint.mod.program.by_leaf(outputs))]
    return set(values) == {differences.coordinate(joint.mod.program, "grad_score")}


class Body(NamedTuple):
    """Statements, and the same for tiles in which `needed` holds."""

    stores: list[Store]
    in_tile: list[Store]
    needed: frozenset[NoMore]


def body(make: Callable[..., list[Store]], *mods: Lanes | None) -> Body:
    """The results of `make` for the mods."""
    inner = [mod and mod.in_tile for mod in mods]
    found = frozenset().union(*(mod.needed for mod in inner if mod))
    return Body(make(*mods), make(*inner) if found else [], found)


class Scatter(NamedTuple):
    """How lanes add to a leaf. Lanes with the same index along rows, columns or diagonals are summed first."""

    over_rows: bool  # one sum for each column
    over_columns: bool  # one sum for each row
    over_diagonals: bool  # one sum for each difference of key and query
    body: Body

    @property
    def summed(self) -> bool:
        return self.over_rows or self.over_columns or self.over_diagonals


def scatters(joint: Lanes) -> list[Scatter]:
    result = []
    program = joint.mod.program
    kinds = differences.found(program, joint.mod.tensor_nodes)
    for i, (leaf, _, indices) in enumerate(program.by_leaf(joint.mod.outputs)):
        over_rows, over_columns = "q_idx" not in leaf.axes, "kv_idx" not in leaf.axes
        over_diagonals = not (over_rows or over_columns) and all(index in kinds for index in indices)
        at = _summed_at(over_rows, over_columns, over_diagonals)
        store, _ = _scatter(joint, i, at, over_diagonals)
        inner, found = (
            _scatter(joint.in_tile, i, at, over_diagonals) if joint.in_tile else (store, frozenset())
        )
        result.append(Scatter(over_rows, over_columns, over_diagonals, Body([store], [inner], found)))
    return result


def _summed_at(over_rows: bool, over_columns: bool, over_diagonals: bool) -> Callable:
    """Where a lane's sum is kept."""
    if over_columns:
        return lambda i: sympy.S.Zero if over_rows else i[0]
    return (lambda i: i[1]) if over_rows or over_diagonals else _lane_at


def _scatter(joint: Lanes, leaf: int, at: Callable, over_diagonals: bool) -> tuple[Store, frozenset[NoMore]]:
    """The statement, and what it needs to hold of a tile."""
    value = _lanes_of(f"leaf_{leaf}_lanes", at)
    # A lane that adds nothing may hold any index.
    adds = lowerings[aten.ne.Scalar](value, 0.0)
    program = joint.mod.program
    (_, _, indices), (_, _, nodes) = (
        program.by_leaf(outputs)[leaf] for outputs in (joint.inline(adds, over_diagonals), joint.mod.outputs)
    )
    parts: list[tuple[Callable, Any, bool]] = []
    found: set[NoMore] = set()
    for index, node, size in zip(indices, nodes, joint.mod.leaf_sizes[leaf], strict=True):
        conditions = joint.conditions([node], [size])
        safe = conditions is not None
        found |= conditions or set()
        if not safe:
            index = lowerings[aten.where.self](adds, index, _constant(0, index.get_dtype()))
        parts.append((index.make_loader(), size, safe))

    def address(i: Sequence[Any]) -> sympy.Expr:
        flat = sympy.S.Zero
        for load, size, safe in parts:
            flat = flat * size + ops.indirect_indexing(load(i), size, check=not safe, wrap_neg=not safe)
        return flat

    room = sympy.Mul(*joint.mod.leaf_sizes[leaf])
    store = Store(f"leaf_{leaf}", value.make_loader(), address, adds=True, room=room)
    return store, frozenset(found | joint.needed if found else ())


# The templates have faster functions for these (lanes.h), where ATen goes through arrays or vectors of masks. A whole
# vector of integers can be loaded without a count.
_FASTER = (
    (
        r"(at::vec::Vectorized(?:<int32_t>|N<int(?:32|64)_t,\d+>))::loadu\((.*), static_cast<int64_t>\(\d+\)\)",
        r"\1::loadu(\2)",
    ),
    (
        r"at::vec::Vectorized<u?int8_t>::loadu\((.*), static_cast<int64_t>\(\d+\)\)",
        r"load_lanes(\1)",
    ),
    (r"(at::vec::Vectorized(?:N)?<[^<>]*>)::arange\(", r"progression<\1>("),
    (r"\b(\w+)\.tanh\(\)", r"hyperbolic_tangent(\1)"),
    (r"\bat::vec::convert<(\w+,\d+,\w+,\d+)>", r"converted<\1>"),
    (r"\bat::vec::VecMask<", "LaneMask<"),
    (r"(LaneMask<\w+,\d+>)\((\w+) ([<>=!]=?) (\w+)\)", r"\1(lanes(\2) \3 \4)"),
    (r"\bdecltype\(\w+\)::blendv\(", "blended("),
    (r"\b(\w+)\.template cast<(\w+,\d+)>\(\)", r"mask_cast<\2>(\1)"),
    (r"\binductor_vec_mask_cast<", "mask_cast<"),
)


class _KernelGroup(KernelGroup):
    def new_kernel(self, *args: Any) -> Any:
        return checks_what_it_computed(super().new_kernel(*args))


def code(body: Body, kernel: TemplateKernel, **axes: bool) -> str:
    """C++ for a body: see `loops` for `axes`."""
    checked = loops(body.stores, kernel, **axes)
    if not body.needed:
        return checked
    holds = " && ".join(sorted(f"{kernel.text(less)} <= {kernel.text(more)}" for less, more in body.needed))
    return f"if ({holds}) {{\n{loops(body.in_tile, kernel, **axes)}\n}} else {{\n{checked}\n}}"


def loops(stores: Sequence[Store], kernel: TemplateKernel, *, row: bool = True, column: bool = True) -> str:
    """Loops over the tile's rows and columns, vectorised along the columns.

    Without `row` or `column` there is just one of them, and the other is vectorised.
    """
    lengths = [length for length, there in ((_ROWS, row), (_COLUMNS, column)) if there] or [sympy.S.One]
    indices = [sympy_index_symbol_with_prefix(SymT.INDEX, i) for i in range(len(lengths))]

    def run(index: Sequence[Any], _reduction: Sequence[Any] = ()) -> None:
        rest = iter(index)
        at = [next(rest) if there else sympy.S.Zero for there in (row, column)]
        # All is read before anything is written.
        values = [store.value(at) for store in stores]
        for store, value in zip(stores, values, strict=True):
            ops.store(_PREFIX + store.buffer, store.address(at), value, "atomic_add" if store.adds else None)

    get_dtype = V.graph.get_dtype
    of_tile = lambda name: torch.float32 if name.startswith(_PREFIX) else get_dtype(name)  # noqa: E731
    # A tile belongs to one thread: no parallel loops, and plain additions for scatters.
    one_thread = {"cpp.threads": 1, "cpp.dynamic_threads": False, "cpp.enable_tiling_heuristics": False}
    with patch.object(V.graph, "get_dtype", of_tile), config.patch(one_thread):
        group = _KernelGroup()
        group.args = NamedSizes()
        group.args.sizevars = kernel.args.sizevars
        group.args.input_buffers.update(kernel.names)
        for name in _buffer_names(stores):
            group.args.input_buffers[_PREFIX + name] = group.args.output_buffers[_PREFIX + name] = name
        body = LoopBody(run, (indices, ()), dict(zip(indices, lengths, strict=True)), indices, ())
        proxy = CppKernelProxy(group)
        proxy.codegen_loop_bodies([body], [(tuple(lengths), ())])
        with patch.object(proxy.loop_nest, "max_parallel_depth", lambda: ParallelDepth(0, 0)):
            group.finalize_kernel(proxy, [])
    code = group.loops_code.getvalue()
    for slow, fast in _FASTER:
        code = re.sub(slow, fast, code)
    code = with_one_access(code, _short(stores, kernel), rows=row and column)
    return "\n".join([*_own_constants(code, kernel), code])


def _own_constants(code: str, kernel: TemplateKernel) -> list[str]:
    """Copies of the pointers and sizes that loops read: those of a closure would be loaded again after each store."""
    known = {*kernel.names.values(), *map(str, kernel.args.sizevars.values())}
    used = sorted(known.intersection(re.findall(r"\w+", code)))
    return [f"const auto outer_{name} = {name}, {name} = outer_{name};" for name in used]


def _short(stores: Sequence[Store], kernel: TemplateKernel) -> set[str]:
    """The names of buffers in which every place fits 32 bits."""
    rooms = [(store.buffer, store.room) for store in stores if store.room is not None]
    for tensor in kernel.tensors:
        steps = zip(tensor.get_size(), tensor.get_stride(), strict=True)
        last = tensor.get_layout().offset + sum((size - 1) * stride for size, stride in steps)
        rooms.append((kernel.names[tensor.get_name()], last))
    known = V.graph.sizevars.statically_known_leq
    return {name for name, _ in rooms} - {name for name, room in rooms if not known(room, LONGEST)}


def _buffer_names(stores: Sequence[Store]) -> set[str]:
    names = {"raw", "scores", "grads", *(store.buffer for store in stores)}
    return names | {f"{name}_lanes" for name in names if name.startswith("leaf_") and name[-1].isdigit()}
