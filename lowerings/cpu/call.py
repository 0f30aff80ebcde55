"""What the CPU kernels read of a call: its mods as lane programs, its schedule, its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir

from flex_inductor.masks.analysis.window import MOST, limits_of
from flex_inductor.mod_ir.split import Programs, with_guards
from flex_inductor.op.schedule import RowBounds, SequenceBounds, by_rows
from flex_inductor.windows import ALL

from ..bounds import CPP, ends, ends_in_sequence, is_tensor
from ..buffers import layout_of, realized
from ..choice import choose
from ..lanes import graph, mods
from ..lanes import programs as without_guards
from ..problem import AttentionProblem
from ..walks import Walk, walks, walks_in
from . import lanes, template, tuner
from .configs import Caches, candidates, estimate

AMX_KEYS = 32  # that a product of tiles takes: in smaller blocks some would belong to a neighbour

INCLUDES = "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"


def programs(problem: AttentionProblem) -> Programs:
    """The call's mods as kernels inline them. What mask_mod rules out is only known once it has been computed."""
    score, mask, joint = without_guards(problem)
    if mask is not None:
        score, joint = (program and with_guards(program) for program in (score, joint))
    return Programs(score, mask, joint)


class Inlined(NamedTuple):
    """The mods, with the tensors that they read as buffers of the surrounding graph."""

    score: lanes.Lanes | None
    mask: lanes.Lanes | None
    joint: lanes.Lanes | None


def inlinable(problem: AttentionProblem, call: Any) -> Inlined:
    sizes = {"b": problem.B, "h": problem.H, "q_idx": problem.M, "kv_idx": problem.N}
    if call.inputs.tile_map is not None:
        sizes = {}  # its indices are data
    found = mods(programs(problem), call.inputs)
    return Inlined(*(mod and lanes.Lanes(mod, sizes) for mod in found))


def visited(problem: AttentionProblem, call: Any, masked: bool) -> tuple[list[Walk], dict[str, Any]]:
    """What is visited, and the tensors that say so, by name."""
    if problem.schedule is None:
        return [], {}
    tensors = {}

    def argument(name: str, tensor: Any) -> str:
        tensors[name] = realized(tensor)
        return name

    schedule = call.inputs.schedule
    if isinstance(schedule, SequenceBounds):
        tensors[template.TABLE] = realized(schedule.sequence_table)
        place, of = ("place.index", "place.count"), "of_sequence({})".format
        found = ends_in_sequence(schedule, "keys", CPP, *place, of)
    elif isinstance(schedule, RowBounds):
        document = None
        if schedule.documents is not None:
            tensors[template.DOCUMENTS] = realized(schedule.documents)
            document = "document({}, {})".format
        found = ends(schedule, "keys", CPP, "row", "M", "N", document)
    else:
        return walks(problem.schedule, by_rows(schedule), "keys", masked, argument), tensors
    numbers = {name: realized(tensor) for name, tensor in found.numbers.items()}
    return walks_in(found._replace(numbers=numbers), "keys", masked), tensors | numbers


def tiles(call: Any) -> dict[str, Any]:
    """The call's map of tiles, if it has one."""
    tile_map = call.inputs.tile_map
    return {} if tile_map is None else dict(zip(template.TILES, map(realized, tile_map), strict=True))


def has_amx() -> bool:
    """Whether torch compiles for AMX here: the CPU and the compiler know it, the system permits it."""
    from torch._inductor.cpu_vec_isa import VecAMX, pick_vec_isa

    return isinstance(pick_vec_isa(), VecAMX)


def rendered(
    name: str,
    kernel: template.TemplateKernel,
    problem: AttentionProblem,
    call: Any,
    tensors: dict[str, Any],
    outputs: Sequence[str],
    lists: dict[str, Any],
    bodies: dict[str, lanes.Body],
    **values: Any,
) -> str:
    """The template of this name with what every CPU kernel is given, and `values`."""
    given = dict(zip(tensors, map(kernel.argument, kernel.tensors[: len(tensors)]), strict=True))
    return INCLUDES + template.source(name).render(
        name=kernel.kernel_name,  # also of the namespace: a package has all its kernels in one file
        element=template.element_type(kernel.tensors[0]),
        is_bf16=int(problem.dtype == torch.bfloat16),
        has_amx=int(has_amx() and (problem.blocks is None or problem.blocks[1] % AMX_KEYS == 0)),
        signature=kernel.declaration,
        profile=kernel.maybe_codegen_profile(),
        scale=f"{float(call.scale)!r}f",
        masked=call.mask_mod is not None,
        limits=_limits(problem, call.inputs.schedule),
        blocks=problem.blocks,
        lane_symbols=lanes.SYMBOL_NAMES,
        bodies={name: lanes.code(body, kernel) for name, body in bodies.items()},
        lists={tensor: given[tensor] for tensor in lists},
        tile_map={tensor: given[tensor] for tensor in template.TILES if tensor in given},
        tensors=given,
        outputs={outputs[i]: kernel.argument(tensor) for i, tensor in kernel.outputs.items()},
        **values,
    )


def _limits(problem: AttentionProblem, schedule: Any) -> dict[str, Any]:
    """How far before and behind its index a query may see; None for any distance."""
    if problem.schedule == "bounds" and schedule.shift is None:
        left, right = schedule.left, schedule.right
        return {
            "left": None if left is None or is_tensor(left) else f"({left} - (N - M))",
            "right": None if right is None or is_tensor(right) or schedule.prefix else f"({right} + N - M)",
        }
    mask = problem.programs.mask
    found = ALL if mask is None else limits_of(graph(mask.lane))
    ends = {"left": found.left, "right": found.right}
    # Of larger numbers, sums of indices may wrap around.
    return {name: int(end) if abs(end) < MOST else None for name, end in ends.items()}


def add_node(
    kernel: str,
    problem: AttentionProblem,
    render: Callable[[Any, template.TemplateKernel], str],
    tensors: dict[str, Any],
    mod_tensors: Sequence[Any],
    layouts: Sequence[ir.Layout],
) -> list[ir.TensorBox]:
    """Add the kernel that `render` writes for a config to the graph; returns its outputs."""

    def rendering(config: Any) -> Callable[[template.TemplateKernel], str]:
        return functools.partial(render, config)

    fitting, rejected = candidates(kernel, problem, Caches.of_this_machine())
    (config,) = choose(
        problem,
        kernel,
        fitting,
        rejected,
        tuner.device(),
        functools.partial(tuner.times, problem, rendering, tensors, mod_tensors, layouts),
        lambda config: estimate(kernel, config, problem),
    )
    return template.add_node(kernel, rendering(config), [*tensors.values(), *mod_tensors], layouts)


def fixed_layout(fake: torch.Tensor) -> ir.FixedLayout:
    size, stride = ([*map(sympy.sympify, lengths)] for lengths in layout_of(fake))
    return ir.FixedLayout(fake.device, fake.dtype, size, stride)


def contiguous_layout(dtype: torch.dtype, size: Sequence[Any]) -> ir.FixedLayout:
    size = [sympy.sympify(length) for length in size]
    return ir.FixedLayout(torch.device("cpu"), dtype, size, ir.FlexibleLayout.contiguous_strides(size))
