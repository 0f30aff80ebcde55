"""What the two ops are called with, by name.

`Inputs` has everything that a call may have beside query, key, value and its mods. The ops' rules handle that bundle as
a whole, so a new input is a field there and a line in the routes that serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import errors
from ..mod_ir.serialise import expect, graph_key
from ..options import CallOptions
from ..visits import KINDS, Schedule, TileMap
from .ring import Ring

QKV = ("query", "key", "value")
MOST_DECODE_ROWS, MOST_DECODE_QUERIES = 16, 4  # rows of a KV head, or rows of each of its query heads


class Inputs(NamedTuple):
    """The optional inputs of a call. A field holds tensors, alone or in a tuple or a NamedTuple, or a constant."""

    score_captures: tuple[Tensor, ...] = ()  # captures of score_mod
    mask_captures: tuple[Tensor, ...] = ()
    schedule: Schedule | None = None  # which blocks to visit; None for all
    tile_map: TileMap | None = None  # where tiles lie and which indices mods see there; None for a plain call
    scattered: bool = False  # whether a map's tiles of keys may lie anywhere
    ring: Ring | None = None  # of ranks, if each has a part of the keys
    partial: bool = False  # outputs and gradients in fp32, to be added to those of other calls
    stand_ins: tuple[Tensor, ...] = ()  # for key and value: they get the gradients, in fp32; not read
    sharded: tuple[Any, Any] | None = None  # tokens here, and how many mods see; only checked
    sinks: Tensor | None = None  # [B or 1, H]: a score of each row that takes weight and has no value
    dropout: Tensor | None = None  # int64 [4]: seed, offset, head_offset, weights of 65536 that are left out
    in_blocks: bool = False  # for dropout: whether tiles of a map begin at multiples of their block for mods
    kv_scales: tuple[Tensor, ...] = ()  # [B or 1, K, N] in fp32: what multiplies narrow keys and values
    grad_entropy: Tensor | None = None  # [B, H, M], backward: the gradient of each row's entropy

    def given(self) -> list[str]:
        """The names of the inputs that the call has."""
        return [name for name, value in zip(self._fields, self, strict=True) if not _is_absent(value)]

    def wire(self) -> dict[str, Any]:
        """In the form of graphs, which have no NamedTuples: one is a tuple that begins with its name."""
        return {name: _wire(getattr(self, name)) for name in self.given()}

    @classmethod
    def read(cls, wire: Any) -> Inputs:
        """From `wire`."""
        if isinstance(wire, Inputs):
            return wire
        return cls(**{name: _bundle(value) for name, value in wire.items()})

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that may have a gradient, in the order of the backward op's results for them."""
        return [tensor for name in DIFFERENTIABLE for tensor in _tensors(getattr(self, name))]

    def by_tensor(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of every tensor, in the order of the fields, given those of `differentiable`."""
        found = iter(gradients)
        return [
            next(found) if name in DIFFERENTIABLE else None
            for name, value in zip(self._fields, self, strict=True)
            for _ in _tensors(value)
        ]


DIFFERENTIABLE = ("score_captures", "stand_ins", "sinks")  # in the order of the fields


def _bundles() -> dict[str, Any]:
    """By name; asked each time, since a kind of schedule may be added."""
    return {**KINDS, "tile_map": TileMap, "ring": Ring}


def _wire(value: Any) -> Any:
    name = next((name for name, kind in _bundles().items() if type(value) is kind), None)
    return value if name is None else (name, *value)


def _bundle(wire: Any) -> Any:
    if not isinstance(wire, (tuple, list)) or not wire or not isinstance(wire[0], str):
        return wire
    (name, *fields), kinds = wire, _bundles()
    if name not in kinds or len(fields) != len(kinds[name]._fields):
        # Only now: a tensor of a trace in forward mode cannot be printed.
        expect(False, f"there is no {name[:80]} with {str(fields)[:80]}")
    return kinds[name](*fields)


def _is_absent(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, tuple) and not value)


def _tensors(value: Any) -> list[Any]:
    """In the order of tree_flatten. That takes ten times as long, and eager calls ask several times."""
    found: list[Any] = []
    for part in value if isinstance(value, tuple) else (value,):
        if part is None:  # most are
            continue
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, tuple):
            found += _tensors(part)
    return found


class AttentionCall(NamedTuple):
    """The arguments of the forward op, in order."""

    query: Tensor  # [B, H, M, D]
    key: Tensor  # [B or 1, K, N, D], H a multiple of K
    value: Tensor  # [B or 1, K, N, V]
    score_mod: Callable | None
    mask_mod: Callable | None
    scale: float | Tensor  # a 0-d tensor where it changes from call to call
    inputs: Inputs = Inputs()
    options: CallOptions = CallOptions()

    @classmethod
    def read(cls, *args: Any) -> AttentionCall:
        """From the arguments of the op, in a graph or not."""
        call = cls(*args)
        if isinstance(call.inputs, Inputs) and isinstance(call.options, CallOptions):
            return call
        return call._replace(inputs=Inputs.read(call.inputs), options=read_options(call.options))

    def wire(self) -> tuple[Any, ...]:
        """The op's arguments as graphs hold them."""
        return (*self[:-2], self.inputs.wire(), _options_wire(self.options))

    def with_inputs(self, **changed: Any) -> AttentionCall:
        return self._replace(inputs=self.inputs._replace(**changed))


class BackwardCall(NamedTuple):
    """The arguments of the backward op, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    score_mod: Callable | None
    joint: Callable | None  # None where score_mod is
    mask_mod: Callable | None
    scale: float
    wants: tuple[str, ...]  # which of query, key and value need a gradient
    inputs: Inputs = Inputs()
    options: CallOptions = CallOptions()

    @classmethod
    def read(cls, *args: Any) -> BackwardCall:
        """From the arguments of the op."""
        call = cls(*args)
        return call._replace(inputs=Inputs.read(call.inputs), options=read_options(call.options))

    def wire(self) -> tuple[Any, ...]:
        return (*self[:-2], self.inputs.wire(), _options_wire(self.options))


Bundle = TypeVar("Bundle", bound=tuple)


def parts(call: Bundle) -> tuple[Bundle, list[Tensor]]:
    """The call, or what a call is part of, with a mark in the place of each tensor, and the tensors."""
    leaves, spec = tree_flatten(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tree_unflatten([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec), tensors


def filled(call: Bundle, values: Iterable[Any]) -> Bundle:
    """The first of `parts` with values in the places of its marks."""
    leaves, spec = tree_flatten(call)
    found = iter(values)
    return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in leaves], spec)


_TENSOR = object()


def _options_wire(options: CallOptions) -> dict[str, Any]:
    """As graphs hold them: they have no NamedTuples."""
    given = zip(options._fields, options, strict=True)
    return {name: value for name, value in given if value != options._field_defaults[name]}


def read_options(wire: Any) -> CallOptions:
    return wire if isinstance(wire, CallOptions) else CallOptions(**wire)


def is_guarded(mask_mod: Any, inputs: Inputs) -> bool:
    """Whether scores may be masked: their indices may then lie outside the tensors that the mods look up."""
    return mask_mod is not None or inputs.schedule is not None


def has_few_queries(
    queries: Any, heads: Any, kv_heads: Any, q_block: Any, inputs: Container[str], at_most: Callable
) -> bool:
    """Whether the CPU kernel for few queries is the better one.

    It is where packing a KV head's keys would not pay, or a query head would fill less than half a block of rows. A map
    does not say how many tiles of queries read a key: with blocks for few queries, one. `at_most(x, y)` says what is
    known of sizes.
    """
    if "dropout" in inputs:  # the kernel for few queries has none
        return False
    if q_block is not None and "tile_map" in inputs:
        queries = q_block
    in_one_block = q_block is None or at_most(queries, q_block)
    few_rows = at_most(queries * heads, MOST_DECODE_ROWS * kv_heads)
    return in_one_block and (few_rows or at_most(queries, MOST_DECODE_QUERIES))


def wanted_gradients(joint: Any, count: int) -> list[bool]:
    """Which of score_mod's captures the joint graph has a gradient for."""
    if joint is None:
        return [False] * count
    (outputs,) = (node.args[0] for node in joint.graph.nodes if node.op == "output")
    return [output is not None for output in outputs[1:]]


def check_served(inputs: Inputs, served: Iterable[str]) -> None:
    """Refuse inputs that the code computing the call does not know."""
    missing = [name for name in inputs.given() if name not in served]
    if missing:
        raise errors.inputs_not_served(missing, served)


def tensors_of(call: AttentionCall | BackwardCall) -> list[Tensor]:
    """All of a call, in the order of its fields."""
    return _tensors(call[:-1])  # options have none


def rows_of(call: AttentionCall | BackwardCall) -> list[Tensor]:
    """The first of them: those that are [B, H, rows, dim] or [B, H, rows]."""
    return [
        field
        for field in call[:3] + (call[3:7] if isinstance(call, BackwardCall) else ())
        if field is not None
    ]


def class_of(call: AttentionCall | BackwardCall) -> Any:
    """The key of the calls that one compiled kernel serves: all of a call but its lengths and values."""
    shapes = [tensor.shape for tensor in tensors_of(call)]
    return *shapes_of_class(shapes, len(rows_of(call))), _class_of(call)


def shapes_of_class(shapes: Sequence[Sequence[int]], rows: int) -> list[tuple[int, ...]]:
    """The part of the tensors' shapes that a class fixes: for the first, which have `rows`, heads and head dims.

    Sizes of 1 and 0 make other kernels: such a tensor may be broadcast, or empty.
    """
    fixed = [(*shape[3:], shape[1], min(shape[0], 2), min(shape[2], 2)) for shape in shapes[:rows]]
    return fixed + [tuple([min(size, 2) for size in shape]) for shape in shapes[rows:]]


def _class_of(part: Any) -> Any:
    if isinstance(part, tuple):
        return type(part), *map(_class_of, part)
    if isinstance(part, Tensor):
        return part.dtype, part.device
    return graph_key(part) if isinstance(part, fx.GraphModule) else part
