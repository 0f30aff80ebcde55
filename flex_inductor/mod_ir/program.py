"""A traced mod cut into what runs once and what runs for every score.

    prologue   of captures alone                 (table * 2, slopes.exp(), bias.sum())
    lane       of 0-d tensors, one score         (score + table[kv_idx - q_idx])
    leaves     what lanes add to tensors         (shape, indices, value): the scatter-adds of a gradient
    epilogue   linear in the accumulated leaves  (the gradient of the prologue)

A mod's own value has only a prologue and a lane part. Kernels inline `lane`; the rest is ordinary
tensor code. `LaneProgram.to_text` is the same as a string, for ops that take no graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx

from . import serialise
from .arguments import SECOND_LANES

AXES = ("b", "h", "q_idx", "kv_idx")


class Leaf(NamedTuple):
    """A tensor of `shape` to which each lane adds a value at its indices; without indices whole values add up.

    Indices are for the first dimensions. If there are more dimensions, the value is a row, else a number.
    """

    shape: tuple[int, ...]  # positions among the invariants where a size is only known at run time
    shape_is_invariant: tuple[bool, ...]
    indices: int  # how many lane outputs, following the value's, are its indices
    axes: tuple[str, ...]  # the lane coordinates that the indices depend on


class LaneProgram(NamedTuple):
    lanes: tuple[str, ...]
    guards: tuple[tuple[str, ...], ...]  # one `live` argument for each: the axes along which it varies
    leaves: tuple[Leaf, ...]
    gradients: tuple[bool, ...]  # which captures the epilogue gives a gradient for
    # (axes it varies along, size) of the tensors that lanes hold
    tensors: tuple[tuple[tuple[str, ...], int], ...]
    prologue: fx.GraphModule | Callable  # (*captures) -> invariants
    # (*lanes, *guards, *captures, *invariants) -> (first, *leaf values and indices)
    lane: fx.GraphModule | Callable
    epilogue: fx.GraphModule | Callable  # (*accumulators, *captures, *invariants) -> gradients

    def by_leaf(self, outputs: Sequence[Any]) -> list[tuple[Leaf, Any, Sequence[Any]]]:
        """Each leaf with the value and the indices that `lane` gives for it, of its `outputs`."""
        rest = iter(outputs[1:])
        return [(leaf, next(rest), [next(rest) for _ in range(leaf.indices)]) for leaf in self.leaves]

    def to_text(self) -> str:
        parts = {part: serialise.graph_data(getattr(self, part)) for part in _PARTS}
        return serialise.dump(
            {
                "lanes": self.lanes,
                "guards": self.guards,
                "leaves": self.leaves,
                "gradients": self.gradients,
                "tensors": self.tensors,
                **parts,
            }
        )

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_text(text: str) -> LaneProgram:
        names = ("lanes", "guards", "leaves", "gradients", "tensors", *_PARTS)
        lanes, guards, leaves, gradients, tensors, *parts = serialise.fields(serialise.load(text), *names)
        return LaneProgram(
            _names(lanes, SECOND_LANES),
            tuple(_names(axes, AXES) for axes in _list(guards)),
            tuple(_leaf_from(leaf) for leaf in _list(leaves)),
            _tuple_of(bool, gradients),
            tuple(_tensor_from(tensor) for tensor in _list(tensors)),
            *map(serialise.graph_function, parts),
        )


_PARTS = ("prologue", "lane", "epilogue")


def _list(data: Any) -> list[Any]:
    serialise.expect(isinstance(data, list), f"expected a list, found {str(data)[:80]}")
    return data


def _tuple_of(kind: type, data: Any) -> tuple:
    serialise.expect(
        all(type(item) is kind for item in _list(data)),
        f"expected a list of {kind.__name__}, found {str(data)[:80]}",
    )
    return tuple(data)


def _names(data: Any, known: Sequence[str]) -> tuple[str, ...]:
    names = _tuple_of(str, data)
    serialise.expect(set(names) <= set(known), f"expected names of {known}, found {str(data)[:80]}")
    return names


def _tensor_from(data: Any) -> tuple[tuple[str, ...], int]:
    serialise.expect(len(_list(data)) == 2, f"expected axes and a size, found {str(data)[:80]}")
    axes, size = data
    serialise.expect(serialise.is_count(size), f"expected a size, found {str(size)[:80]}")
    return _names(axes, AXES), size


def _leaf_from(data: Any) -> Leaf:
    serialise.expect(len(_list(data)) == len(Leaf._fields), f"expected a leaf, found {str(data)[:80]}")
    shape, is_invariant, indices, axes = data
    serialise.expect(
        all(map(serialise.is_count, [*_list(shape), indices])), f"expected sizes in {str(data)[:80]}"
    )
    return Leaf(tuple(shape), _tuple_of(bool, is_invariant), indices, _names(axes, AXES))
