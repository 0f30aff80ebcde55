"""Finds mods with integers that may leave int32, the dtype of indices, and makes them compute in int64.

Ranges follow from the numbers of batches, heads, queries and keys. Captured numbers, such as positions, lengths and
documents, count as at most CAPTURED.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .ranges import ARITHMETIC, NUMBERS, Order, Range, absolute, operation

INT32 = torch.iinfo(torch.int32)
CAPTURED = 1 << 28
LONGEST = 1 << 30  # first guess of a size that changes from call to call

_EXPRESSIONS = Order(torch.sym_min, torch.sym_max)
_UNKNOWN: Any = object()
_CAPTURES = Range(-CAPTURED, CAPTURED)
_RENAMED = {"clamp_min": "maximum", "clamp_max": "minimum"}
_CONSTANTS = {"full", "scalar_tensor"}
_COPIES = {"_to_copy", "alias", "clone", "detach", "lift_fresh_copy"}
_BITS = {"bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"}
_STAY = _BITS | {"bitwise_not", "bitwise_right_shift", "__rshift__", "fmod", "remainder", "sign", "where"}
_READS = {"embedding", "gather", "index", "index_select", "select", "take"}
_SHIFTS = {"bitwise_left_shift", "__lshift__"}


class Sizes(NamedTuple):
    """How many there are of each index: numbers, or symbols of a trace."""

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any


def may_leave_int32(graph: fx.Graph, indices: Sequence[fx.Node], sizes: Sizes) -> bool:
    """Whether an operation of a mod may leave int32. `indices` are b, h, q_idx and kv_idx."""
    numbers = [LONGEST if isinstance(size, torch.SymInt) else size for size in sizes]
    if not _leaves(graph, dict(zip(indices, map(_below, numbers), strict=True)), NUMBERS, _is_beyond):
        return False
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return True
    ranges = dict(zip(indices, map(_below, sizes), strict=True))
    return _leaves(graph, ranges, _EXPRESSIONS, _may_be_beyond)


def _below(size: Any) -> Range:
    return Range(0, size - 1)


def _is_beyond(found: Range) -> bool:
    return found.least < INT32.min or found.most > INT32.max


def _may_be_beyond(found: Range) -> bool:
    """The same for expressions: a trace guards on the answers."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes long to import

    return not (guard_or_false(found.least >= INT32.min) and guard_or_false(found.most <= INT32.max))


def _leaves(
    graph: fx.Graph, ranges: dict[Any, Range], order: Order, is_beyond: Callable[[Range], bool]
) -> bool:
    of_indices = set(ranges)
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if value.is_floating_point() or value.is_complex():
            continue
        name = operation(node.target)
        operands = [_operand(argument, ranges) for argument in node.args]
        found = Range(0, 1)
        if value.dtype != torch.bool:
            found = _range(_RENAMED.get(name, name), operands, node.kwargs, order)
        if of_indices.isdisjoint(node.all_input_nodes):
            ranges[node] = found if name in _CONSTANTS and found is not _UNKNOWN else _CAPTURES
            continue
        of_indices.add(node)
        if value.dtype == torch.int32:
            computes = torch.Tag.pointwise in getattr(node.target, "tags", ()) and name not in _STAY
            if computes if found is _UNKNOWN else is_beyond(found):
                return True
        ranges[node] = found
    return False


def _operand(argument: Any, ranges: dict[Any, Range]) -> Any:
    """A range; None for an argument that is not given."""
    if argument is None:
        return None
    if isinstance(argument, int):
        return Range(int(argument), int(argument))
    return _UNKNOWN if isinstance(argument, (float, list, tuple)) else ranges.get(argument, _CAPTURES)


def _range(name: str, operands: Sequence[Any], kwargs: dict[str, Any], order: Order) -> Any:
    """The range of an operation's result if integers had no limits."""
    if name in _COPIES:
        return _CAPTURES if operands[0] is _UNKNOWN else operands[0]
    if name == "remainder" and operands[1] is not _UNKNOWN:
        least = operands[1].least
        return ARITHMETIC[name](order, *operands) if isinstance(least, int) and least > 0 else _UNKNOWN
    if name in _CONSTANTS:
        return operands[-1]
    if _UNKNOWN in operands and name != "where":
        return _CAPTURES if name in _READS else _UNKNOWN
    if name in ("add", "sub", "rsub"):
        left, right = operands[::-1] if name == "rsub" else operands
        right = ARITHMETIC["mul"](order, right, Range(kwargs.get("alpha", 1), kwargs.get("alpha", 1)))
        return ARITHMETIC["add" if name == "add" else "sub"](order, left, right)
    if name in ARITHMETIC:
        return ARITHMETIC[name](order, *operands)
    if name in ("div", "floor_divide"):
        most = absolute(order, operands[0]).most
        return Range(-most, most)
    if name == "where":
        if _UNKNOWN in operands[1:]:
            return _UNKNOWN
        return Range(*map(lambda lesser, ends: lesser(*ends), order, zip(*operands[1:], strict=True)))
    if name in _BITS and all(isinstance(found.least, int) and found.least >= 0 for found in operands):
        return Range(0, operands[0].most + operands[1].most)
    if name in _SHIFTS and isinstance(operands[1].most, int) and operands[1].most < 64:
        return ARITHMETIC["mul"](order, operands[0], Range(0, 1 << max(operands[1].most, 0)))
    power = Range(2, 2) if name == "square" else operands[1] if name == "pow" else None
    if power is not None and isinstance(power.most, int) and 0 <= power.most < 64:
        most = absolute(order, operands[0]).most
        for _ in range(power.most - 1):
            most = most * absolute(order, operands[0]).most
        return Range(-most, order.maximum(most, 1))
    return _UNKNOWN


def graph_may_leave_int32(graph: fx.GraphModule, lanes: Sequence[str], sizes: Sizes) -> bool:
    """Whether a lane graph may leave int32. Its arguments are `lanes`, then captures."""
    known = graph.meta.setdefault("flex_inductor_leaves_int32", {})
    is_number = not any(isinstance(size, torch.SymInt) for size in sizes)
    if is_number and sizes in known:
        return known[sizes]
    indices = graph.graph.find_nodes(op="placeholder")[: len(lanes)][-len(sizes) :]
    found = may_leave_int32(graph.graph, indices, sizes)
    if is_number:
        known[sizes] = found
    return found


def rounded(size: Any) -> Any:
    """Up to a power of two, so that calls of similar size are decided alike. Symbols stay."""
    return size if isinstance(size, torch.SymInt) else 1 << max(size - 1, 0).bit_length()


def in_int64(mod: Callable[..., Any], lanes: Sequence[str]) -> Callable[..., Any]:
    """`mod`, with indices of 64 bits."""

    @functools.wraps(mod, updated=())
    def wide(*args: Any) -> Any:
        first = len(lanes) - len(Sizes._fields)
        indices = (index.long() for index in args[first : len(lanes)])
        return mod(*args[:first], *indices, *args[len(lanes) :])

    return wide
