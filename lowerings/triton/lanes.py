"""Lane graphs as Triton statements, by Inductor's lowerings and the printer in printer.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.common import CSEVariable
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from flex_inductor.mod_ir.program import LaneProgram

from .. import lanes
from ..lanes import LaneLowering, conversions, graph
from .kernel import INT_MAX, Arguments, fits_int32
from .printer import ALONG_A_TILE, SCORED, Lane, LaneKernel, LaneOps, Statement, dtype_of
from .whole_tiles import LANES, MAPPED_LANES, whole

aten = torch.ops.aten


class Value(NamedTuple):
    """A value that a lane graph computes."""

    variable: CSEVariable
    axes: frozenset[str]

    @property
    def name(self) -> str:
        return str(self.variable)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.variable)


class LaneCode:
    """The statements of lane graphs that may share values.

    `prefix` begins their names. With `approximate`, functions need only be as exact as 16-bit inputs show. With
    `nvidia`, comparisons are written for that compiler; they share what the code `beside` has written of indices.
    """

    def __init__(
        self,
        arguments: Arguments,
        prefix: str,
        device: torch.device,
        *,
        approximate: bool,
        nvidia: bool,
        beside: LaneCode | None = None,
    ):
        other: LaneKernel | None = None if beside is None else beside.kernel
        self.kernel: LaneKernel = LaneKernel(arguments, prefix, device, approximate, nvidia, other)

    def inline(self, program: LaneProgram, lanes: Sequence[Lane], inputs: Sequence[Any]) -> list[Value]:
        """The lane graph's outputs on `lanes`. `inputs` are its captures and invariants."""
        kernel, device = self.kernel, self.kernel.device
        for value in inputs:
            if isinstance(value, ir.TensorBox):
                kernel.arguments.capture(value)
        scored = [name for name, lane in zip(program.lanes, lanes, strict=True) if SCORED in lane.axes]
        lowering = _Lowering(program, kernel, _decisive(graph(program.lane), scored))
        values = [_value(kernel.variable(lane), lane.dtype, device) for lane in lanes]
        with V.graph.set_current_device(device), self._printing():
            outputs = [_computed(result) for result in lowering.outputs(*values, *inputs)]
        return [Value(variable, kernel.axes[str(variable)]) for variable in outputs]

    def element(self, indices: Sequence[Value], size: Sequence[Any]) -> tuple[str, list[str]]:
        """The offset of an element of a contiguous tensor, and the comparisons that hold if it exists."""
        kernel, offset, step = self.kernel, sympy.S.Zero, sympy.S.One
        checks = []
        with self._printing() as ops:
            for index, length in zip(reversed(indices), reversed(size), strict=True):
                symbol = ops.indirect_indexing(index.variable, length)
                offset, step = offset + symbol * step, step * length
                checks += [kernel.checks[symbol.name]] if symbol.name in kernel.checks else []
            wide = not fits_int32(step)
            return kernel.text(offset, wide), checks

    @contextlib.contextmanager
    def _printing(self) -> Iterator[LaneOps]:
        ops = LaneOps(self.kernel, TritonOverrides())
        with V.set_kernel_handler(self.kernel), V.set_ops_handler(ops):
            yield ops

    def statements(self) -> list[Statement]:
        """All statements, in order."""
        return [*self.kernel.written.statements.values()]

    @contextlib.contextmanager
    def writing(self) -> Iterator[list[Statement]]:
        """Afterwards the list has the statements that were written meanwhile."""
        before, found = len(self.kernel.written.statements), list[Statement]()
        yield found
        found += self.statements()[before:]

    def whole(self, condition: Value, mapped: bool = False) -> str | None:
        """See whole_tiles.py. Heads and batches must be scalars."""
        axes = self.kernel.axes

        def uniform(name: str) -> bool:
            return not axes.get(name, ALONG_A_TILE) & ALONG_A_TILE

        lanes = MAPPED_LANES if mapped else LANES
        return whole(condition.variable, self.kernel.made, uniform, lanes)


class _Lowering(LaneLowering):
    """Computes each node's value when it meets it, so that nothing is computed twice."""

    def __init__(self, program: LaneProgram, kernel: LaneKernel, decisive: set[fx.Node]):
        super().__init__(program, _LOWERINGS)
        self.kernel, self.decisive = kernel, decisive

    def run_node(self, node: fx.Node) -> Any:
        self.kernel.rough = self.kernel.approximate and node not in self.decisive
        self.kernel.rounds = node in self.decisive and node.target in _PRODUCTS and _is_added(node)
        result = super().run_node(node)
        if node.op != "call_function" or not isinstance(result, ir.TensorBox):
            return result
        return _value(_computed(result), result.get_dtype(), result.get_device_or_error())


_PRODUCTS = {aten.mul.Scalar, aten.mul.Tensor}
_SUMS = {
    aten.add.Scalar,
    aten.add.Tensor,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.sub.Scalar,
    aten.sub.Tensor,
}
_ROUNDING = {
    aten.ceil.default,
    aten.floor.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Tensor,
    aten.round.default,
    aten.trunc.default,
}


def _decisive(graph: fx.Graph, scored: Sequence[str]) -> set[fx.Node]:
    """The floats that an index or a comparison depends on, and that depend on no score.

    They are computed exactly, so that a bucket begins where it does in eager torch. Where scores decide, rounding
    moves such borders anyway.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        steps = node.target in _ROUNDING or node.kwargs.get("rounding_mode") or not _is_float(node)
        if node.op == "call_function" and (steps or node in found):
            found.update(filter(_is_float, node.all_input_nodes))
    touched = {node for node in graph.find_nodes(op="placeholder") if node.name in scored}
    for node in graph.nodes:
        if touched & {*node.all_input_nodes}:
            touched.add(node)
    return found - touched


def _is_added(node: fx.Node) -> bool:
    return any(
        user.target in _SUMS or (user.target is aten.neg.default and _is_added(user)) for user in node.users
    )


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _computed(value: ir.TensorBox) -> CSEVariable:
    """Write the statements for a 0-d value."""
    computed = value.make_loader()([])
    return computed.value if isinstance(computed, OpsValue) else computed


def _value(variable: Any, dtype: torch.dtype, device: torch.device) -> ir.TensorBox:
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=lambda _: OpsValue(variable), ranges=[])


def _constant(value: Any, dtype: torch.dtype) -> ir.TensorBox:
    return _value(V.ops.constant(value, dtype), dtype, V.graph.get_current_device_or_throw())


def _of_index(operator: str, x: ir.TensorBox, y: Any) -> ir.TensorBox | None:
    """The quotient or remainder of a number of at least 0 by a positive one, without cases for signs."""
    dtype = x.get_dtype()
    variable = _computed(x) if dtype in (torch.int32, torch.int64) else None
    if not isinstance(variable, CSEVariable) or not isinstance(y, int) or not 0 < y < INT_MAX:
        return None
    kernel, (least, most) = V.kernel, (variable.bounds.lower, variable.bounds.upper)
    if not least >= 0:
        return None
    largest = y - 1 if operator == "%" else most // y if most.is_Integer else int_oo
    found = kernel.new(f"{variable} {operator} {y}", dtype, ValueRanges(0, largest))
    kernel.made[str(found)] = (operator, (variable, y))
    return _value(found, dtype, x.get_device_or_error())


def _remainder(x: Any, y: Any) -> ir.TensorBox:
    found = _of_index("%", x, y) if isinstance(x, ir.TensorBox) else None
    return lowerings[aten.remainder](x, y) if found is None else found


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> ir.TensorBox:
    """Inductor's, but without multiplying by a reciprocal: the quotient may be an index."""
    found = None if rounding_mode is None else _of_index("//", x, y)
    if found is not None:
        return found
    whole = rounding_mode is not None and isinstance(y, int) and not x.get_dtype().is_floating_point
    if isinstance(y, int | float) and not whole:
        y = _constant(float(y), x.get_dtype() if x.get_dtype().is_floating_point else torch.float32)
    return lowerings[aten.div.Tensor_mode](x, y, rounding_mode=rounding_mode)


_LOWERINGS: dict[Any, Callable[..., Any]] = {
    **conversions(_constant),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode), _div),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _remainder),
}


def refusal(program: LaneProgram) -> str | None:
    """Why the program cannot be inlined, or None if it can."""
    return lanes.refusal(program, _LOWERINGS)
