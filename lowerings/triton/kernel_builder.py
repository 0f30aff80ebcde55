"""The parts that the kernels of a call share: mods, schedule and rendering."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

import jinja2
import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges

from flex_inductor.mod_ir.arguments import INDEX_DTYPE
from flex_inductor.softmax import MORE
from flex_inductor.visits import places
from flex_inductor.visits.text import TRITON, Language, Walk, walks

from ..buffers import layout_of, realized
from ..call import LoweredCall
from ..decision import Choice
from ..lanes import Mods
from ..problem import AttentionProblem
from . import autotuner, narrow
from .configs import LARGEST_TILE, Config
from .device import current_device
from .fitting import Chosen, dot_precision, one_block, padded
from .kernel import Arguments, KernelCall, Launch, Tensor, empty, launch
from .lanes import LaneCode, Value
from .printer import ALONG_A_TILE, SCORED, Lane, Statement

Grid: TypeAlias = Callable[[Config], Sequence[Any]]

ALL = frozenset(("b", "h", "q_idx", "kv_idx", SCORED))
LOG2_E = 1.4426950408889634
FAR = 1 << 30  # no position in a sequence is larger


class MapTables(NamedTuple):
    """A call's map in the form of templates."""

    m: Tensor
    n: Tensor
    scattered: bool
    in_batches: bool  # whether scattered keys are of several batches
    aligned: bool  # whether the kernel's tiles of keys are whole tiles of the map, or equal parts of one
    columns: dict[str, int]


_COLUMNS = {
    name: getattr(places, name.upper()) for name in ("batch", "row", "sequence", "head", "index", "count")
}


class Text(NamedTuple):
    """A mod in the form of the template."""

    statements: list[Statement]
    outer: frozenset[str]  # the axes that are fixed before the loop
    result: str
    outputs: list[Value]
    whole: str | None = None  # of a mask: holds only if every lane of the tile is chosen

    @property
    def inside(self) -> str:
        """The statements in the loop, a line each."""
        return "".join(f"{statement.text}\n" for statement in self._inside)

    @property
    def hoisted(self) -> list[str]:
        """The statements before it."""
        return [statement.text for statement in self.statements if statement.axes <= self.outer]

    @property
    def _inside(self) -> list[Statement]:
        return [statement for statement in self.statements if not statement.axes <= self.outer]

    @property
    def loads(self) -> dict[str, int]:
        """How many captured values the loop loads, as Shape counts them."""
        inside = self._inside
        return {
            "tile_loads": sum(s.loads and s.in_every_lane for s in inside),
            "line_loads": sum(s.loads and not s.in_every_lane for s in inside),
            "score_loads": sum(s.per_score for s in inside),
        }

    def read_again(self, earlier: Text) -> int:
        """How many values, each of a whole tile, the loop reads of an earlier mod's."""
        reads = frozenset[str]().union(*(s.reads for s in self._inside))
        return len(reads.intersection(s.name for s in earlier.statements if s.in_every_lane))


class Inlined(NamedTuple):
    """The call's mods, as one kernel has them."""

    score: Text | None
    mask: Text | None
    joint: Text | None

    @property
    def hoisted(self) -> str:
        return "\n".join(line for text in self if text is not None for line in text.hoisted)

    @property
    def counts(self) -> Counter[str]:
        """What the mods load, and keep for the score's gradient, as Shape counts it."""
        found: Counter[str] = Counter()
        for text in self:
            found.update({} if text is None else text.loads)
        if self.joint is not None and self.score is not None:
            found["tile_values"] += self.joint.read_again(self.score)
        return found


class _Reads(NamedTuple):
    """How the Triton of a kernel names the present line; see visits.text.Kernel."""

    builder: Builder
    line: str

    @property
    def language(self) -> Language:
        return TRITON

    def argument(self, name: str, tensor: Any) -> Tensor:
        return self.builder.tensor(name, realized(tensor))

    def document(self, table: Any) -> Callable[[str, int], str]:
        found = self.argument("documents", table)
        batch, row, columns = found.stride
        of_batch = "" if found.size[0] == "1" else f" + b * {batch}"

        def document(place: str, column: int) -> str:
            return f"tl.load({found.name}{of_batch} + {place} * {row} + {column} * {columns})"

        return document

    def entry(self, table: Any) -> Callable[[int], str]:
        found = self.argument("sequence_table", table)
        row, columns = found.stride
        return lambda column: f"tl.load({found.name} + sequence * {row} + {column} * {columns})"

    def number(self) -> str:
        return self.line

    def lengths(self) -> tuple[str, str]:
        problem = self.builder.problem
        return self.builder.size(problem.M), self.builder.size(problem.N)

    def tile(self, side: str) -> tuple[str, str]:
        held = "m" if side == "keys" else "n"
        return f"shift_{held}", f"stop_{held}"


class Builder:
    """One kernel of a call: its arguments, and the mods as statements on tiles of `tile` shape."""

    def __init__(self, problem: AttentionProblem, call: LoweredCall, mods: Mods, outer: Sequence[str]):
        self.problem, self.call, self.mods = problem, call, mods
        self.mapped = problem.map_tiles is not None
        self.outer = frozenset(outer)  # the axes that are fixed before the kernel's loop
        self.tile = "[BLOCK_M, BLOCK_N]" if "q_idx" in outer else "[BLOCK_N, BLOCK_M]"
        self.arguments = Arguments()
        self.size, self.tensor = self.arguments.size, self.arguments.tensor
        approximate = problem.dtype.itemsize < 4
        self.nvidia = current_device(problem.device).nvidia
        code = functools.partial(
            LaneCode, self.arguments, device=problem.device, approximate=approximate, nvidia=self.nvidia
        )
        self.score_code = code(prefix="score_")
        self.mask_code = code(prefix="mask_", beside=self.score_code)

    def written(self, outputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
        """The outputs as arguments; None for those that nothing reads."""
        return {
            name: None if output is None else self.tensor(name, output, written=True)
            for name, output in outputs.items()
        }

    def launch(self, first: Any, second: Any, third: Any, side: str | None = None) -> tuple[Launch, Grid]:
        """How the kernel's instances are numbered, and their grid. `first` is a number of instances, or a length with
        an instance for each of the kernel's tiles along it: on the side "m" or "n"."""
        firsts = f"tl.cdiv({self.size(first)}, BLOCK_{side.upper()})" if side else self.size(first)
        found = launch(firsts, second, third, self.size)

        def grid(config: Config) -> Sequence[Any]:
            count = tiles(first, getattr(config, f"block_{side}")) if side else first
            return found.grid(count, second, third)

        return found, grid

    def inline(self) -> Inlined:
        """Write the call's mods here. The joint program may use the score_mod's values."""
        return Inlined(*(self._inlined(name) for name in Mods._fields))

    def _inlined(self, name: str) -> Text | None:
        mod = getattr(self.mods, name)
        if mod is None:
            return None
        code = self.mask_code if name == "mask" else self.score_code
        with code.writing() as statements:
            outputs = code.inline(mod.program, self._lanes(mod.program.lanes), mod.inputs)
        whole = code.whole(outputs[0], self.mapped) if name == "mask" else None
        result = self.spread(outputs[0], "tl.int1" if name == "mask" else "tl.float32")
        return Text(statements, self.outer, result, outputs, whole)

    def spread(self, value: Value, dtype: str) -> str:
        """`value` with the shape of a tile."""
        text = value.name if value.dtype in (torch.bool, torch.float32) else f"{value.name}.to({dtype})"
        return text if value.axes >= ALONG_A_TILE else f"tl.broadcast_to({text}, {self.tile})"

    def _lanes(self, names: Sequence[str]) -> list[Lane]:
        p = self.problem
        below, seen = {"b": p.B, "h": p.H, "q_idx": p.M, "kv_idx": p.N}, {}
        bounds: dict[str, ValueRanges] = {}
        if self.mapped:
            below, seen = dict.fromkeys(below, sympy.oo), {"b": "sequence", "h": "seen_h"}
            # Positions of queries are negative where a sequence has more queries than keys.
            bounds = {n: ValueRanges(-FAR if n == "q_idx" else 0, FAR) for n in below}
        return [
            Lane(seen.get(n, n), frozenset((n,)), INDEX_DTYPE, sympy.sympify(below[n]), bounds.get(n))
            if n in below
            else Lane("d_score" if n == "grad_score" else n, ALL, torch.float32)
            for n in names
        ]

    def softmax_inputs(self) -> dict[str, Any]:
        """The call's sinks and dropout, for templates."""
        given = {name: getattr(self.call.inputs, name) for name in ("sinks", "dropout")}
        tensors = {n: None if t is None else self.tensor(n, realized(t)) for n, t in given.items()}
        return {**tensors, "in_groups": self._in_groups()}

    def _in_groups(self) -> bool:
        """Whether blocks begin at whole groups of dropout's rule: 16 queries, 32 keys."""
        p = self.problem
        if p.blocks is None:
            return True
        blocks = zip(p.blocks, (p.M, p.N), (16, 32), strict=True)
        whole = (block % group == 0 or one_block(p, block, length) for block, length, group in blocks)
        return (not self.mapped or self.call.inputs.in_blocks) and all(whole)

    def walks(self, side: str, number: str = "line") -> list[Walk]:
        """Passes over what the line `number` of the call's schedule visits: partial blocks, then full ones."""
        reads = _Reads(self, number)
        return walks(self.call.inputs.schedule, side, self.mods.mask is not None, self.mapped, reads)

    def values(
        self, inlined: Inlined, tensors: Mapping[str, Any] | None = None, scaled: bool = True
    ) -> dict[str, Any]:
        """The values that every template gets. If not `scaled`, the scale is part of the exponent.

        Scores are scaled, or what the instance holds before its products. The latter only for a power of two from 1/16
        to 1, which is exact except for float16 below 2**-25.
        """
        p, scale = self.problem, float(self.call.scale)
        exact = 1 / 16 <= abs(scale) <= 1 and abs(math.frexp(scale)[0]) == 0.5
        # Found by compiling: in other kernels it runs out of registers, or keeps the unscaled operand as well.
        shared = current_device(p.device).shared_operands
        before = scaled and exact and (padded(p.D) <= 64 if shared else "q_idx" in self.outer)
        blocks = p.blocks or (None, None)
        sizes = {name: self.size(getattr(p, name)) for name in ("H", "M", "N", "D", "V")}
        values: dict[str, Any] = {
            **sizes,
            "head_rows": sizes["M"],
            "q_block": self._block(blocks[0], p.M),
            "kv_block": self._block(blocks[1], p.N),
            "many_tiles": self._many_tiles(),
            "rows_in_tiles": not self.mapped
            and (blocks[0] is None or one_block(p, blocks[0], p.M) or LARGEST_TILE % blocks[0] == 0),
            "constants": {
                "D_PAD": padded(p.D),
                "V_PAD": padded(p.V),
                "EVEN_M": self._even(p.M, blocks[0], "BLOCK_M"),
                "EVEN_N": self._even(p.N, blocks[1], "BLOCK_N"),
                "TO_LOG2": LOG2_E if scaled else LOG2_E * scale,
            },
            "LOG2_E": LOG2_E,
            "to_natural": repr(1.0 if scaled else scale),
            "scaled": scaled and not before,
            "scaled_before": before,
            "scale": repr(scale),
            "group": int(p.H) // int(p.K),
            "kv_b": "tl.zeros([], tl.int32)" if p.B_kv == 1 else "b",
            # gfx950 knows no "tf32", not even where it means nothing: in 16 bits.
            "precision": repr(dot_precision(p.dtype) if self.nvidia else "ieee"),
            "nvidia": self.nvidia,
            "family": current_device(p.device).family,
            "tile_shape": self.tile,
            "places_of": "plain_places.jinja",
            "score_mod": inlined.score,
            "mask_mod": inlined.mask,
            "joint": inlined.joint,
            "hoisted": inlined.hoisted,
            "grad_entropy": None,
            **self.softmax_inputs(),
            "narrow": narrow.of(p, self.call, self.tensor),
        }
        given = self.call.inputs.tile_map
        if given is not None and p.blocks is not None:  # lengths become the ends of the present tile
            m, n = (
                self.tensor(f"tiles_{side}", realized(lines)) for side, lines in zip("mn", given, strict=True)
            )
            aligned = p.blocks[1] & (p.blocks[1] - 1) == 0
            tile_map = MapTables(m, n, p.scattered, p.scattered and p.B_kv != 1, aligned, _COLUMNS)
            values |= {"places_of": "mapped_places.jinja", "tile_map": tile_map}
            values |= {"M": "stop_m", "N": "stop_n", "kv_b": "kv_b"}
        return values | {name: self.tensor(name, tensor) for name, tensor in (tensors or {}).items()}

    def _block(self, block: int | None, length: Any) -> str | None:
        """Tokens in a block, no more than there are."""
        if block is None:
            return None
        return self.size(length) if one_block(self.problem, block, length) else str(block)

    def _many_tiles(self) -> str:
        """Whether blocks have so many tiles that mask_mod probably chooses some whole: a constant expression of the
        kernel."""
        p = self.problem
        if p.blocks is None:
            return "True"
        sizes = str(self._block(p.blocks[0], p.M)), str(self._block(p.blocks[1], p.N))
        if not all(size.isdigit() for size in sizes):
            return "True"
        return f"({sizes[0]} // BLOCK_M) * ({sizes[1]} // BLOCK_N) >= 8"

    def _even(self, length: Any, block: int | None, tile: str) -> str:
        """Whether every tile that is visited lies inside: a constant expression of the kernel."""
        size = self.size(length)
        if not size.isdigit() or self.mapped:
            return "False"
        unit = tile if block is None or block >= int(size) else str(block)
        return f"{size} % {unit} == 0"

    def add(
        self,
        template: str,
        chosen: Chosen,
        values: dict[str, Any],
        launched: tuple[Launch, Grid],
        accumulated: Sequence[str] = (),
    ) -> list[Choice]:
        """Add the kernel to the graph; what was chosen for it is for the decision."""

        def render(name: str, decorators: str) -> str:
            constants = [*chosen.configs[0].constants(chosen.axes)]
            parameters = [*self.arguments.names, *(f"{constant}: tl.constexpr" for constant in constants)]
            return source(template).render(
                name=name,
                parameters=", ".join(parameters),
                decorators="\n".join([*_or_next(chosen), decorators]),
                axes=chosen.axes,
                launch=launched[0],
                **values,
            )

        KernelCall(render, self.arguments, chosen, launched[1], accumulated)
        return [] if chosen.choice is None else [chosen.choice]


def _or_next(chosen: Chosen) -> list[str]:
    """The decorator of a kernel whose config was chosen, and its import."""
    if chosen.choice is None:
        return []
    spare = [config.launch(chosen.axes) for config in chosen.spare]
    given = [chosen.kind, spare, chosen.asked_for, *([chosen.timed_as] if chosen.timed_as else [])]
    decorator = autotuner.or_next
    arguments = ", ".join(map(repr, given))
    return [
        f"from {decorator.__module__} import {decorator.__name__}\n",
        f"@{decorator.__name__}({arguments})",
    ]


def softmax_values(builder: Builder, inlined: Inlined) -> dict[str, Any]:
    """The values for templates that use softmax.jinja."""
    tensors = {name: realized(getattr(builder.call, name)) for name in ("query", "key", "value")}
    # A negative scale would turn the exponent around.
    return builder.values(
        inlined, tensors, scaled=inlined.score is not None or float(builder.call.scale) <= 0
    )


def further(outputs: Mapping[str, Any]) -> list[str]:
    """Which of MORE a kernel writes."""
    return [name for name in MORE if outputs.get(name) is not None]


def walked(problem: AttentionProblem) -> tuple[Any, Any, Any]:
    """The batches, queries and keys that kernels go through. With a map: one batch of whole blocks."""
    if problem.map_tiles is None or problem.blocks is None:
        return problem.B, problem.M, problem.N
    return 1, *(count * block for count, block in zip(problem.map_tiles, problem.blocks, strict=True))


def tiles(length: Any, tile: int) -> Any:
    return FloorDiv(sympy.sympify(length) + tile - 1, tile)


def unwritten(problem: AttentionProblem, fake: torch.Tensor, dtype: torch.dtype, value: float) -> Any:
    """A buffer for what the op's fake rule returned, filled with `value` where rows may be in no tile of a map."""
    size, stride = layout_of(fake)
    if problem.map_tiles is None:
        return empty(size, stride, dtype, problem.device)
    full = lowerings[torch.ops.aten.full](size, value, dtype=dtype, device=problem.device)
    return ir.ExternKernel.require_exact_strides(full, stride)


@functools.cache
def source(name: str) -> jinja2.Template:
    folder = str(resources.files("flex_inductor.templates").joinpath("triton"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
