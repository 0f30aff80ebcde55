"""The parts of lane programs that all families of kernels share.

Which can be inlined, what they read, how Inductor's lowerings go through a lane graph, and the parts that run outside
the kernel. How a lane's values are written differs by family: cpu/lanes.py, triton/lanes.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import fallbacks, lowerings, to_dtype
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering, SubgraphLoweringException
from torch._inductor.virtualized import V, ops

from flex_inductor.mod_ir.program import LaneProgram
from flex_inductor.mod_ir.split import Programs

from .buffers import realized
from .problem import AttentionProblem, dtype_name

aten = torch.ops.aten

# Pointwise on 0-d tensors, though not tagged so.
_ALSO_POINTWISE = {
    aten.index.Tensor,
    aten.full.default,
    aten.scalar_tensor.default,
    aten._to_copy.default,
    aten.where.ScalarOther,
    aten.zeros_like.default,
}


def first_refusal(programs: Programs, refused: Callable[[LaneProgram], str | None]) -> str | None:
    """The first mod that a family cannot inline, with what `refused` says of it; None if it can inline all."""
    for name, program in zip(("score_mod", "mask_mod", "score_mod's gradient"), programs, strict=True):
        if program is not None and (reason := refused(program)):
            return f"{name} {reason}"
    return None


def refusal(program: LaneProgram, own_lowerings: Container[Any]) -> str | None:
    """Why the program's lane graph cannot be inlined, or None if it can."""
    prologue, lane, epilogue = (graph(part) for part in (program.prologue, program.lane, program.epilogue))
    for node in (*prologue.nodes, *lane.nodes, *epilogue.nodes):
        if node.op == "get_attr":
            return "holds a constant tensor"
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_complex():
            return "computes with complex numbers"
    for node in lane.nodes:
        value = node.meta.get("val")
        if node.op != "call_function":
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return f"computes a tensor for each score ({node.target})"
        pointwise = node.target in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
        known = node.target in lowerings or node.target in own_lowerings
        if not pointwise or not known or node.target in fallbacks:
            return f"uses {node.target}, which is not inlined"
        if node.target not in own_lowerings and not _inlines(node, lane):
            dtypes = ", ".join(dtype_name(n.meta["val"].dtype) for n in node.all_input_nodes)
            return f"uses {node.target} of {dtypes}, which is not inlined"
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


def graph(part: Any) -> fx.Graph:
    return part.graph


def programs(problem: AttentionProblem) -> Programs:
    """The call's mods as kernels inline them, without guards."""
    return Programs(*(program and with_reciprocals(program) for program in problem.programs))


def with_reciprocals(program: LaneProgram) -> LaneProgram:
    """Where the mod divides a score or its gradient by a number, multiply by the reciprocal: one more rounding.

    Values computed from indices alone are still divided: the result may have to be whole.
    """
    lane = copy.deepcopy(program.lane)
    placeholders = graph(lane).find_nodes(op="placeholder")
    scored = {
        node
        for name, node in zip(program.lanes, placeholders, strict=False)
        if name in ("score", "grad_score")
    }
    for node in graph(lane).nodes:
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


class Mod(NamedTuple):
    """One mod of one call: its program, and what its lane graph reads besides the lane."""

    program: LaneProgram
    captures: list[Any]
    invariants: list[Any]  # results of the prologue: buffers of the surrounding graph, and sizes
    tables: Sequence[Any] = ()  # of values that lanes load instead of computing them

    @property
    def inputs(self) -> list[Any]:
        return [*self.captures, *self.invariants, *self.tables]

    @property
    def named(self) -> dict[fx.Node, Any]:
        """The inputs, by the nodes of the lane graph that stand for them."""
        placeholders = graph(self.program.lane).find_nodes(op="placeholder")
        return dict(zip(placeholders[len(placeholders) - len(self.inputs) :], self.inputs, strict=True))

    @property
    def tensor_nodes(self) -> list[fx.Node]:
        """Those nodes whose inputs are tensors."""
        return [node for node, given in self.named.items() if isinstance(given, ir.IRNode)]

    @property
    def outputs(self) -> Sequence[Any]:
        """The nodes that the lane graph gives."""
        return graph(self.program.lane).find_nodes(op="output")[0].args[0]

    @property
    def leaf_sizes(self) -> list[list[Any]]:
        return [
            [
                self.invariants[size] if known_late else sympy.Integer(size)
                for size, known_late in zip(leaf.shape, leaf.shape_is_invariant, strict=True)
            ]
            for leaf in self.program.leaves
        ]

    @property
    def own_indices(self) -> list[set[str]]:
        """For each leaf, which of b, h, q_idx and kv_idx are indices into it unchanged."""
        return [
            {index.name for index in indices if index.op == "placeholder"}
            for _, _, indices in self.program.by_leaf(self.outputs)
        ]

    def gradients(self, sums: Sequence[Any]) -> list[Any]:
        """The gradient of each capture from the sums of the leaves, in the surrounding graph."""
        found = outside(self.program.epilogue, *sums, *self.captures, *self.invariants)
        return [
            None
            if gradient is None
            else lowerings[aten.expand](to_dtype(gradient, capture.get_dtype()), [*capture.get_size()])
            for gradient, capture in zip(found, self.captures, strict=True)
        ]


class Mods(NamedTuple):
    score: Mod | None = None
    mask: Mod | None = None
    joint: Mod | None = None


def mods(programs: Programs, inputs: Any) -> Mods:
    """The mods of a call with these inputs; `programs` are those that its kernels inline."""
    captures = (inputs.score_captures, inputs.mask_captures, inputs.score_captures)
    return Mods(
        *(program and _mod(program, given) for program, given in zip(programs, captures, strict=True))
    )


def _mod(program: LaneProgram, captures: Sequence[Any]) -> Mod:
    captures = [*map(realized, captures)]
    found = outside(program.prologue, *captures)
    return Mod(
        program,
        captures,
        [realized(value) if isinstance(value, ir.TensorBox) else value for value in found],
    )


def conversions(constant: Callable[[Any, torch.dtype], ir.TensorBox]) -> dict[Any, Callable[..., Any]]:
    """Lowerings of ops that make and convert numbers; `constant` gives a number for every lane.

    Inductor's own would compare the size of a tile, which is not known, with that of a 0-d value.
    """

    def full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
        assert not size, "lanes hold 0-d tensors"
        return constant(value, torch.tensor(value).dtype if dtype is None else dtype)

    def to_copy(value: ir.TensorBox, *, dtype: torch.dtype | None = None, **_: Any) -> ir.TensorBox:
        return value if dtype is None else to_dtype(value, dtype)

    return {
        aten._to_copy.default: to_copy,
        aten.full.default: full,
        aten.scalar_tensor.default: lambda value, **options: full([], value, **options),
        aten.zeros_like.default: lambda value, **_: constant(0, value.get_dtype()),
    }


class LaneLowering(PointwiseSubgraphLowering):
    """Runs a lane graph by Inductor's lowerings, and by a family's own where it has one."""

    def __init__(self, program: LaneProgram, own_lowerings: Mapping[Any, Callable[..., Any]]):
        super().__init__(program.lane, V.graph, additional_lowerings=own_lowerings)  # type: ignore[arg-type]
        # A constant that has been written to is loaded, where others are numbers in the code.
        self.mutated_buffers = V.graph.mutated_buffers

    def outputs(self, *inputs: Any) -> list[Any]:
        """The graph's outputs on lanes, guards, captures, invariants and tables."""
        with V.set_graph_handler(self):
            self.run(*inputs)
        results: Any = self.graph_outputs
        return [*results]


def outside(part: Any, *inputs: Any) -> Any:
    """What a prologue or an epilogue gives, ordinary tensor code, lowered into the surrounding graph."""
    return _Outside(part).run(*inputs)


class _Outside(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        with V.graph.set_current_node(node):  # some lowerings look at it
            return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.sym_size.int:
            return args[0].get_size()[args[1]]
        if target is aten._to_copy.default:  # Inductor has no lowering: it decomposes it earlier
            dtype = kwargs.get("dtype")
            return args[0] if dtype is None else to_dtype(args[0], dtype)
        if isinstance(target, torch._ops.OpOverload):
            return V.graph.call_function(target, args, kwargs)
        return target(*args, **kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0]
