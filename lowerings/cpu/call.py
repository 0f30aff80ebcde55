"""The parts of a call that CPU kernels read: its mods as lane programs, its schedule, its outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP

from flex_inductor.masks.analysis.window import MOST, limits_of
from flex_inductor.mod_ir.program import LaneProgram
from flex_inductor.mod_ir.split import Programs, with_guards
from flex_inductor.visits import Bounds
from flex_inductor.visits.text import CPP, Walk, is_tensor, walks
from flex_inductor.visits.window import ALL

from ..buffers import layout_of, realized
from ..call import LoweredCall
from ..choice import choose
from ..decision import Choice
from ..lanes import graph, mods
from ..lanes import programs as without_guards
from ..problem import AttentionProblem
from . import lanes, template, tuner
from .configs import Caches, candidates, estimate
from .differences import coordinate
from .flatten import flatten
from .tables import with_tables

_NARROW = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}  # bits of the exponent

INCLUDES = "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"
PROFILE = "#include <torch/csrc/inductor/aoti_runtime/utils.h>\n"  # for records of torch's profiler


def programs(problem: AttentionProblem) -> Programs:
    """The call's mods as kernels inline them. mask_mod's result is known only once it is computed."""
    score, mask, joint = without_guards(problem)
    if mask is not None:
        score, joint = (program and with_guards(program) for program in (score, joint))
    return Programs(score, mask, joint)


class Inlined(NamedTuple):
    """The mods, with the tensors that they read as buffers of the surrounding graph."""

    score: lanes.Lanes | None
    mask: lanes.Lanes | None
    joint: lanes.Lanes | None


def inlinable(problem: AttentionProblem, call: LoweredCall, scaled: bool = True) -> Inlined:
    """The call's mods. Unless products are `scaled`, score_mod scales them first."""
    sizes = {"b": problem.B, "h": problem.H, "q_idx": problem.M, "kv_idx": problem.N}
    if call.inputs.tile_map is not None:
        sizes = {}  # its indices are data
    of_call = programs(problem)
    if not scaled:
        for program in filter(None, (of_call.score, of_call.joint)):
            _scale_scores(program, call.scale)
    inlined = Inlined(*(mod and lanes.Lanes(mod, sizes) for mod in mods(of_call, call.inputs)))
    for of_mod in inlined:
        if of_mod is not None and sizes:
            of_mod.mod = with_tables(flatten(of_mod.mod, sizes), sizes)
    return inlined


class _Reads:
    """How the C++ of a kernel names the present line; see visits.text.Kernel."""

    language = CPP

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}  # the tensors that say what is visited, by name

    def argument(self, name: str, tensor: Any) -> str:
        self.tensors[name] = realized(tensor)
        return name

    def document(self, table: Any) -> Callable[[str, int], str]:
        self.argument(template.DOCUMENTS, table)
        return "document({}, {})".format

    def entry(self, table: Any) -> Callable[[int], str]:
        self.argument(template.TABLE, table)
        return "of_sequence({})".format

    def number(self) -> str:
        return "row"

    def lengths(self) -> tuple[str, str]:
        return "M", "N"

    def tile(self, side: str) -> tuple[str, str]:
        return "place.index", "place.count"


def visited(call: LoweredCall, masked: bool) -> tuple[list[Walk], dict[str, Any]]:
    """What is visited, and the tensors that say so, by name."""
    schedule, reads = call.inputs.schedule, _Reads()
    if schedule is None:
        return [], {}
    return walks(schedule, "keys", masked, call.inputs.tile_map is not None, reads), reads.tensors


def tiles(call: LoweredCall) -> dict[str, Any]:
    """The call's map of tiles, if it has one."""
    tile_map = call.inputs.tile_map
    return {} if tile_map is None else dict(zip(template.TILES, map(realized, tile_map), strict=True))


def _scale_scores(program: LaneProgram, scale: float) -> None:
    """Give the lane graph, in place, a product of query and key for its score."""
    score = coordinate(program, "score")
    lane = graph(program.lane)
    with lane.inserting_before(next(node for node in lane.nodes if node.op != "placeholder")):
        scaled = lane.call_function(torch.ops.aten.mul.Tensor, (score, float(scale)))
    scaled.meta["val"] = score.meta["val"]
    score.replace_all_uses_with(scaled, lambda user: user is not scaled)
    lane.eliminate_dead_code()


def scaled_late(score: lanes.Lanes | None, call: LoweredCall) -> bool:
    """Whether exponentials scale scores, where there is no score_mod to do it."""
    # -inf, of what is masked, times a scale that is 0 in float32 would be NaN.
    return score is None and call.scale >= torch.finfo(torch.float32).tiny


def has_amx() -> bool:
    """Whether torch compiles for AMX here: the CPU and the compiler know it, the system permits it."""
    from torch._inductor.cpu_vec_isa import VecAMX, pick_vec_isa

    return isinstance(pick_vec_isa(), VecAMX)


def rendered(
    name: str,
    kernel: template.TemplateKernel,
    problem: AttentionProblem,
    call: LoweredCall,
    tensors: dict[str, Any],
    outputs: Sequence[str],
    lists: dict[str, Any],
    bodies: dict[str, lanes.Body],
    **values: Any,
) -> str:
    """Renders the template of this name with `values` and those that every CPU kernel gets."""
    given = dict(zip(tensors, map(kernel.argument, kernel.tensors[: len(tensors)]), strict=True))
    profile = kernel.maybe_codegen_profile().replace(
        str(kernel.kernel_name), f"attention_{name.split('.')[0]}"
    )
    includes = INCLUDES + PROFILE if profile else INCLUDES
    return includes + template.source(name).render(
        name=kernel.kernel_name,  # names the namespace too: a package has all its kernels in one file
        element=DTYPE_TO_CPP[kernel.tensors[0].get_dtype()],
        is_bf16=int(problem.dtype == torch.bfloat16),
        narrow=_NARROW.get(kernel.tensors[1].get_dtype(), 0),
        has_amx=int(has_amx()),
        signature=kernel.declaration,
        profile=profile,
        scale=f"{float(call.scale)!r}f",
        masked=call.mask_mod is not None,
        limits=_limits(problem, call.inputs.schedule),
        blocks=problem.blocks,
        lane_symbols=lanes.SYMBOL_NAMES,
        bodies={name: lanes.code(body, kernel) for name, body in bodies.items()},
        places_of="plain_places.jinja" if problem.map_tiles is None else "mapped_places.jinja",
        lists={tensor: given[tensor] for tensor in lists},
        grids=_grids(call.inputs.schedule, lists, given),
        tile_map={tensor: given[tensor] for tensor in template.TILES if tensor in given},
        tensors=given,
        outputs={outputs[i]: kernel.argument(tensor) for i, tensor in kernel.outputs.items()},
        **values,
    )


def _grids(schedule: Any, lists: dict[str, Any], given: dict[str, template.Argument]) -> tuple[str, str]:
    """For how many batches and heads the schedule has entries."""
    if isinstance(schedule, Bounds):
        return ("B" if lists and schedule.sequence_table is None else "1"), "1"
    batches, heads = next(iter(given[name].size[:2] for name in lists), ("1", "1"))
    return batches, heads


def _limits(problem: AttentionProblem, schedule: Any) -> dict[str, Any]:
    """How far before and behind its index a query may see; None for any distance."""
    if problem.schedule == "bounds" and problem.map_tiles is None and schedule.shift is None:
        left, right = schedule.left, schedule.right
        return {
            "left": None if left is None or is_tensor(left) else f"({left} - (N - M))",
            "right": None if right is None or is_tensor(right) or schedule.prefix else f"({right} + N - M)",
        }
    mask = problem.programs.mask
    found = ALL if mask is None else limits_of(graph(mask.lane))
    ends = {"left": found.left, "right": found.right}
    # With larger numbers, sums of indices may wrap around.
    return {name: int(end) if abs(end) < MOST else None for name, end in ends.items()}


def add_node(
    kernel: str,
    problem: AttentionProblem,
    render: Callable[[Any, template.TemplateKernel], str],
    tensors: dict[str, Any],
    mod_tensors: Sequence[Any],
    layouts: Sequence[ir.Layout],
) -> tuple[list[ir.TensorBox], Choice]:
    """Add the kernel that `render` writes for a config to the graph; returns its outputs and that config."""

    def rendering(config: Any) -> Callable[[template.TemplateKernel], str]:
        return functools.partial(render, config)

    fitting, rejected = candidates(kernel, problem, Caches.of_this_machine())
    (config,), choice = choose(
        problem,
        kernel,
        fitting,
        rejected,
        tuner.device(),
        functools.partial(tuner.times, problem, rendering, tensors, mod_tensors, layouts),
        lambda config: estimate(kernel, config, problem),
    )
    return template.add_node(kernel, rendering(config), [*tensors.values(), *mod_tensors], layouts), choice


def fixed_layout(fake: torch.Tensor) -> ir.FixedLayout:
    size, stride = ([*map(sympy.sympify, lengths)] for lengths in layout_of(fake))
    return ir.FixedLayout(fake.device, fake.dtype, size, stride)


def fp32_layout(size: Sequence[Any]) -> ir.FixedLayout:
    size = [sympy.sympify(length) for length in size]
    return ir.FixedLayout(
        torch.device("cpu"), torch.float32, size, ir.FlexibleLayout.contiguous_strides(size)
    )
