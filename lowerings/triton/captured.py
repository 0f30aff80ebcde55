"""Gradients of captured tensors: how lanes add to the leaves of the joint program.

    stores   where every lane has an element to itself
    atomics  elsewhere: instances add fp32, in no fixed order

Under torch.use_deterministic_algorithms results do not depend on the order:

    slots    where the index does not change along the keys: each row of queries has a slot for its sum and one for
             the sum's place, and index_put adds them up in order. A few times the memory of a logsumexp
    units    elsewhere: instances add integers, multiples of a unit so small that fp32 shows no difference and so
             large that no sum overflows. A first pass finds it: it adds up all magnitudes. 8 bytes an element
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, to_dtype

from flex_inductor.mod_ir.program import LaneProgram, Leaf

from ..buffers import realized
from ..lanes import Mod
from ..problem import AttentionProblem
from .kernel import empty
from .kernel_builder import Builder, Inlined
from .printer import Statement, before_the_loop

aten = torch.ops.aten

# The sum of all magnitudes is this many units. int64 holds twice as many, as the sum may have been rounded down.
_UNITS_LOG2 = 61


class Sum(NamedTuple):
    """What lanes add into one leaf.

    `where` it is added: by each "lane", by each "column" of a tile, or at the kernel's end by each "row" or "once".
    """

    how: str  # "stores", "atomics", "slots", "units", or "magnitude" if only that is wanted
    where: str
    size: list[Any]  # of the leaf
    buffer: Any  # the leaf in fp32 or in units, or slots for rows of queries
    places: Any = None  # slots for offsets into the leaf
    per_unit: Any = None  # 1 / unit


class Placed(NamedTuple):
    """A leaf in the form of the template."""

    name: str
    how: str
    where: str
    in_place: bool  # lanes add where they are, see Config.coalesced
    value: str  # of each lane, as a tile
    offset: str
    inside: str  # the condition that the leaf has such an element, or None
    pointed: str  # `inside`, and that the lane lies in its tensors, or None


def sums(joint: Mod, problem: AttentionProblem) -> list[Sum]:
    """An accumulator for every leaf.

    `with_units` completes those that count in units.
    """
    found = []
    leaves = zip(joint.program.leaves, joint.leaf_sizes, _alone(joint, problem), strict=True)
    for leaf, size, alone in leaves:
        where = _where(leaf)
        if alone or not torch.are_deterministic_algorithms_enabled():
            buffer = zeros(size, torch.float32, problem)
            found.append(Sum("stores" if alone else "atomics", where, size, buffer))
        elif where in ("row", "once"):
            slots = [_slots(dtype, problem) for dtype in (torch.float32, torch.int64)]
            # With a map the rows of a head may be of several sequences.
            found.append(Sum("slots", where if problem.map_tiles is None else "row", size, *slots))
        else:
            found.append(Sum("units", where, size, zeros(size, torch.int64, problem)))
    return found


def _where(leaf: Leaf) -> str:
    if "kv_idx" in leaf.axes:
        return "lane" if "q_idx" in leaf.axes else "column"
    return "row" if "q_idx" in leaf.axes else "once"


def _alone(joint: Mod, problem: AttentionProblem) -> list[bool]:
    """For each leaf, whether each lane has its own element: every axis longer than 1 is an index unchanged."""
    if problem.map_tiles is not None:  # with a map, mods may see the same indices in several tiles
        return [False] * len(joint.program.leaves)
    sizes = {"b": problem.B, "h": problem.H, "q_idx": problem.M, "kv_idx": problem.N}
    wanted = {axis for axis, size in sizes.items() if size != 1}
    return [wanted <= own for own in joint.own_indices]


def zeros(size: Sequence[Any], dtype: torch.dtype, problem: AttentionProblem) -> Any:
    """Contiguous, as offsets into leaves are: Inductor would pad strides above 1024."""
    full = lowerings[aten.full](size, 0, dtype=dtype, device=problem.device)
    stride = ir.FlexibleLayout.contiguous_strides(size)
    return realized(ir.ExternKernel.require_exact_strides(full, stride))


def _slots(dtype: torch.dtype, problem: AttentionProblem) -> Any:
    size = [problem.B, problem.H, problem.M]
    if problem.map_tiles is not None:  # whose tiles may leave rows out
        return zeros(size, dtype, problem)
    return empty(size, None, dtype, problem.device)


def magnitudes(found: Sequence[Sum], problem: AttentionProblem) -> list[Sum]:
    """For a first pass: the sums that count in units, with slots for the magnitudes of each row's contributions."""
    return [
        total._replace(how="magnitude", buffer=_slots(torch.float32, problem))
        if total.how == "units"
        else total._replace(how="nothing")
        for total in found
    ]


def with_units(found: Sequence[Sum], measured: Sequence[Sum]) -> list[Sum]:
    return [
        total._replace(per_unit=_per_unit(magnitude.buffer)) if total.how == "units" else total
        for total, magnitude in zip(found, measured, strict=True)
    ]


def _per_unit(magnitudes: Any) -> Any:
    """A power of two, within fp32's range; NaN if a contribution is not finite."""
    total = lowerings[aten.sum](magnitudes)
    log2 = lowerings[aten.sub](float(_UNITS_LOG2), lowerings[aten.ceil](lowerings[aten.log2](total)))
    per_unit = lowerings[aten.exp2](lowerings[aten.maximum](lowerings[aten.minimum](log2, 126.0), -66.0))
    return realized(lowerings[aten.add](per_unit, lowerings[aten.mul](total, 0.0)))


def place(
    builder: Builder, inlined: Inlined, found: Sequence[Sum], program: LaneProgram
) -> tuple[Inlined, list[Placed]]:
    """The leaves as the template adds to them, and the mods with what is computed for that."""
    joint = inlined.joint
    assert joint is not None
    placed = []
    lengths = ("stop_m", "stop_n")
    if not builder.mapped:
        lengths = builder.size(builder.problem.M), builder.size(builder.problem.N)
    inside_tile = {
        "lane": "live",
        "column": f"(columns < {lengths[1]})[None, :]",
        "row": f"(rows < {lengths[0]})[:, None]",
    }
    leaves = program.by_leaf(joint.outputs)
    more: list[Statement] = []
    with builder.score_code.writing() as statements:
        for i, (total, (_, value, indices)) in enumerate(zip(found, leaves, strict=True)):
            if total.how == "nothing":
                continue
            name = builder.tensor(f"sum_{i}", total.buffer, written=True).name
            offset, checks = builder.score_code.element(indices, total.size)
            where = "row" if total.how == "magnitude" else total.where
            if total.places is not None:
                builder.tensor(f"{name}_places", total.places, written=True)
            if total.per_unit is not None:
                unit = builder.tensor(f"{name}_units", total.per_unit).name
                more.append(before_the_loop(f"{name}_per_unit", f"tl.load({unit})"))
            in_place = builder.nvidia and (total.how, where) == ("atomics", "lane")
            pointed = " & ".join([*checks, *([inside_tile[where]] if where in inside_tile else [])])
            inside = " & ".join(checks)
            spread = builder.spread(value, "tl.float32")
            placed.append(
                Placed(name, total.how, where, in_place, spread, offset, inside or "None", pointed or "None")
            )
    joint = joint._replace(statements=[*joint.statements, *statements, *more])
    return inlined._replace(joint=joint), placed


def counts(placed: Sequence[Placed]) -> Counter[str]:
    """The counts of Shape: places in leaves that are kept, and additions in the layout of the scores."""
    return Counter(
        tile_values=sum(each.where == "lane" for each in placed),
        score_adds=sum(each.in_place for each in placed),
    )


def total(total: Sum) -> Any:
    """The leaf in fp32."""
    if total.how in ("stores", "atomics"):
        return total.buffer
    if total.how == "units":
        unit = lowerings[aten.reciprocal](total.per_unit)
        return lowerings[aten.mul](to_dtype(total.buffer, torch.float32), unit)
    values, places = total.buffer, total.places
    if total.where == "once":
        values, places = lowerings[aten.sum](values, [2]), lowerings[aten.select](places, 2, 0)
    elements = sympy.prod(map(sympy.sympify, total.size))
    empty_leaf = lowerings[aten.full]([elements], 0, dtype=torch.float32, device=values.get_device())
    added = _index_put(
        empty_leaf, [lowerings[aten.view](places, [-1])], lowerings[aten.view](values, [-1]), True
    )
    return lowerings[aten.view](added, total.size)


# Inductor's own lowering would add by atomics.
_index_put = fallback_handler(aten.index_put.default, add_to_fallback_set=False)
