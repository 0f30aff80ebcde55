"""What the kernels of one call have in common: their mods, schedule and rendering."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges

from flex_inductor import compat
from flex_inductor.mod_ir.arguments import INDEX_DTYPE
from flex_inductor.visits.places import BATCH, COUNT, HEAD, INDEX, PIECE, ROW, SEQUENCE, TileMap
from flex_inductor.visits.text import TRITON, Language, Walk, walks

from ..buffers import layout_of, realized
from ..choice import choose, demanded, problem_class
from ..lanes import Mods
from ..problem import AttentionProblem
from . import fallback_configs, search, timing
from .configs import (
    COALESCED,
    LARGEST_TILE,
    Config,
    Shape,
    axes_of,
    candidates,
    current_device,
    describe,
    estimate,
    misfit,
    without_choice,
)
from .hinted_configs import hinted
from .kernel import Arguments, Launch, Tensor, empty, launch
from .lanes import SCORED, Inlined, Lane, LaneCode, Statement
from .packed_heads import packed
from .tables import TABLES

ALL = frozenset(("b", "h", "q_idx", "kv_idx", SCORED))
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
HOLD_QUERIES = ("forward", "decode", "backward_dq", "backward_magnitudes")  # and walk keys
FAR = 1 << 30  # no position in a sequence lies further


class MapTables(NamedTuple):
    """A call's map as templates write it."""

    m: Tensor
    n: Tensor
    scattered: bool
    aligned: bool  # whether the kernel's tiles of keys are whole tiles of the map, or equal parts of one
    columns: dict[str, int]


_COLUMNS = {
    "batch": BATCH,
    "row": ROW,
    "sequence": SEQUENCE,
    "head": HEAD,
    "index": INDEX,
    "count": COUNT,
}


class Inline(NamedTuple):
    """A mod as the template writes it."""

    inside: list[str]
    result: str
    outputs: list[Inlined]
    whole: str | None = None  # of a mask: holds only if every lane of the tile is chosen


def _read_again(earlier: Sequence[Statement], later: Sequence[str]) -> int:
    """How many values, each of a whole tile, `later` statements read of `earlier` ones."""
    whole = {s.text.partition(" = ")[0] for s in earlier if {"q_idx", "kv_idx"} <= s.axes}
    return len(whole.intersection(word for line in later for word in re.findall(r"\w+", line)))


class _Reads(NamedTuple):
    """How the Triton of a kernel speaks of the line at hand; see visits.text.Kernel."""

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

    def __init__(
        self,
        problem: AttentionProblem,
        mods: Mods,
        outer: Sequence[str],
        tile_map: TileMap | None = None,
    ):
        self.problem, self.mods, self.tile_map = problem, mods, tile_map
        self.outer = frozenset(outer)  # the axes that are fixed before the kernel's loop
        self.tile = "[BLOCK_M, BLOCK_N]" if "q_idx" in outer else "[BLOCK_N, BLOCK_M]"
        self.arguments = Arguments()
        approximate = problem.dtype.itemsize < 4
        self.nvidia = current_device(problem.device).nvidia
        self.score_code, self.mask_code = (
            LaneCode(self.arguments, prefix, problem.device, approximate=approximate, nvidia=self.nvidia)
            for prefix in ("score_", "mask_")
        )
        self.hoisted: list[str] = []
        self.kind = ""
        self.axes: list[str] = []  # along which its configs may differ
        self.spare: list[Config] = []  # tried if the card has not the resources for what is chosen
        self.asked_for = False  # whether hints chose
        self.tile_loads = 0  # captured values that every lane loads
        self.score_loads = 0  # those that need not pass through shared memory
        self.score_adds = 0  # what every lane adds to memory and need not pass through it
        self.line_loads = 0  # those that vary along the walked side alone
        self.tile_values = 0  # what is computed for every lane's score and kept for its gradient

    def size(self, expression: Any) -> str:
        return self.arguments.size(expression)

    def tensor(self, name: str, value: Any, *, written: bool = False) -> Tensor:
        return self.arguments.tensor(name, value, written=written)

    def launch(self, firsts: str, second: Any, third: Any) -> Launch:
        """How the kernel's instances are numbered."""
        return launch(firsts, second, third, self.size)

    def inline(self, name: str, extend: Callable[[Inline], None] | None = None) -> Inline | None:
        """Write the mod `name` here. "joint" comes after "score" and may use its values.

        `extend` may write more statements after the mod's.
        """
        mod = getattr(self.mods, name)
        if mod is None:
            return None
        code = self.mask_code if name == "mask" else self.score_code
        code.kernel.mantissas |= self.score_code.kernel.mantissas
        earlier = code.statements()
        outputs = code.inline(mod.program, self._lanes(mod.program.lanes), mod.inputs)
        result = self.spread(outputs[0], "tl.int1" if name == "mask" else "tl.float32")
        inline = Inline([], result, outputs, None)
        if name == "mask":
            inline = inline._replace(whole=code.whole(outputs[0], self.tile_map is not None))
        if extend is not None:
            extend(inline)
        inline.inside.extend(self._place(code.statements()[len(earlier) :]))
        if name == "joint":
            self.tile_values += _read_again(earlier, inline.inside)
        return inline

    def _place(self, statements: Sequence[Statement]) -> list[str]:
        """The statements that belong in the loop; the others run before it."""
        inside = [s for s in statements if not s.axes <= self.outer]
        self.hoisted += [s.text for s in statements if s.axes <= self.outer]
        self.score_loads += sum("per_score" in s.text for s in inside)
        loads = [s for s in inside if "tl.load(" in s.text]
        whole = sum({"q_idx", "kv_idx"} <= s.axes for s in loads)
        self.tile_loads += whole
        self.line_loads += len(loads) - whole
        return [s.text for s in inside]

    def shape(self, kind: str) -> Shape:
        """What a kernel's configs are chosen by, given the mods inlined so far."""
        counts = ("tile_loads", "score_loads", "score_adds", "line_loads", "tile_values")
        return shape_of(self.problem, kind, **{name: getattr(self, name) for name in counts})

    def configs(self, kind: str) -> list[Config]:
        """The configs to time, or the one to use; called once the mods are inlined."""
        shape = self.shape(kind)
        table, cost = TABLES[kind]
        device = current_device(self.problem.device)
        fitting, rejected = candidates(table, cost, device, shape)
        tiles = search.tiles(fitting, [config for config, _ in rejected], cost, device, shape)
        more = [*tiles[len(fitting) :], *search.with_axes(kind, tiles, cost, device, shape)]
        fitting += search.with_axes(kind, fitting[:1], cost, device, shape)
        others = fitting
        wanted = hinted(fitting[0], kind, self.problem.options.hinted)
        if wanted != fitting[0]:
            self.asked_for = True
            fitting, more = [wanted if misfit(wanted, cost, device, shape) is None else fitting[0]], []
        self.kind, self.timed_as = kind, problem_class(self.problem, kind)
        chosen = choose(
            self.problem,
            kind,
            fitting,
            rejected,
            device.key,
            time=None,
            estimate=lambda config: estimate(config, cost, device, shape),
            more=[config for config in more if config not in fitting],
        )
        if demanded(self.problem, kind) is None:
            plain = {*axes_of(chosen)}
            self.spare = [c for c in others if c not in chosen and plain.issuperset(axes_of([c]))]
        self.axes = axes_of(chosen)
        if self.score_adds and COALESCED not in self.axes:  # what layouts forbid is known once it is compiled
            self.axes.append(COALESCED)
        return chosen

    def spread(self, value: Inlined, dtype: str) -> str:
        """`value` with the shape of a tile."""
        text = value.name if value.dtype in (torch.bool, torch.float32) else f"{value.name}.to({dtype})"
        whole = {"q_idx", "kv_idx"} <= value.axes
        return text if whole else f"tl.broadcast_to({text}, {self.tile})"

    def _lanes(self, names: Sequence[str]) -> list[Lane]:
        p = self.problem
        below, seen = {"b": p.B, "h": p.H, "q_idx": p.M, "kv_idx": p.N}, {}
        bounds: dict[str, ValueRanges] = {}
        if self.tile_map is not None:
            below, seen = dict.fromkeys(below, sympy.oo), {"b": "sequence", "h": "seen_h"}
            # Positions of queries are negative where a sequence has more queries than keys.
            bounds = {n: ValueRanges(-FAR if n == "q_idx" else 0, FAR) for n in below}
        return [
            Lane(seen.get(n, n), frozenset((n,)), INDEX_DTYPE, sympy.sympify(below[n]), bounds.get(n))
            if n in below
            else Lane("d_score" if n == "grad_score" else n, ALL, torch.float32)
            for n in names
        ]

    def walks(self, call: Any, side: str, number: str = "line") -> list[Walk]:
        """Passes over what the line `number` of the call's schedule visits: partial blocks, then full ones."""
        reads = _Reads(self, number)
        return walks(call.inputs.schedule, side, self.mods.mask is not None, self.tile_map is not None, reads)

    def common(self) -> dict[str, Any]:
        """What every template is given."""
        p = self.problem
        blocks = p.blocks or (None, None)
        sizes = {name: self.size(getattr(p, name)) for name in ("M", "N", "D", "V")}
        values: dict[str, Any] = {
            **sizes,
            "head_rows": sizes["M"],
            "D_PAD": padded(p.D),
            "V_PAD": padded(p.V),
            "q_block": self._block(blocks[0], p.M),
            "kv_block": self._block(blocks[1], p.N),
            "many_tiles": self._many_tiles(),
            "rows_in_tiles": self.tile_map is None
            and (blocks[0] is None or self._holds_all(blocks[0], p.M) or LARGEST_TILE % blocks[0] == 0),
            "even_m": self._even(p.M, blocks[0], "BLOCK_M"),
            "even_n": self._even(p.N, blocks[1], "BLOCK_N"),
            "group": int(p.H) // int(p.K),
            "kv_b": "tl.zeros([], tl.int32)" if one_kv_batch(p) else "b",
            "precision": repr(dot_precision(p.dtype)),
            "nvidia": self.nvidia,
            "tile_shape": self.tile,
            "tile_map": None,
        }
        if self.tile_map is not None:  # lengths become the ends of the tile at hand
            m, n = (self.tensor(f"tiles_{s}", realized(x)) for s, x in zip("mn", self.tile_map, strict=True))
            aligned = blocks[1] & (blocks[1] - 1) == 0
            tile_map = MapTables(m, n, p.scattered, aligned, _COLUMNS)
            values |= {"tile_map": tile_map, "M": "stop_m", "N": "stop_n", "kv_b": "kv_b"}
        return values

    def _block(self, block: int | None, length: Any) -> str | None:
        """Tokens in a block, no more than there are."""
        if block is None:
            return None
        return self.size(length) if self._holds_all(block, length) else str(block)

    def _holds_all(self, block: int, length: Any) -> bool:
        return one_block(self.problem, block, length)

    def _many_tiles(self) -> str:
        """Whether blocks have so many tiles that mask_mod probably chooses some whole: a constant expression of the
        kernel."""
        p = self.problem
        if p.blocks is None:
            return "True"
        sizes = self._block(p.blocks[0], p.M), self._block(p.blocks[1], p.N)
        if not all(size.isdigit() for size in sizes):
            return "True"
        return f"({sizes[0]} // BLOCK_M) * ({sizes[1]} // BLOCK_N) >= 8"

    def _even(self, length: Any, block: int | None, tile: str) -> str:
        """Whether every tile that is visited lies inside: a constant expression of the kernel."""
        size = self.size(length)
        if not size.isdigit() or self.tile_map is not None:
            return "False"
        unit = tile if block is None or block >= int(size) else str(block)
        return f"{size} % {unit} == 0"

    def scaling(self, scaled: bool, scale: float) -> dict[str, Any]:
        """Where the scale is applied: to scores, or to what the instance holds before its products. The latter only
        for a power of two from 1/16 to 1, which is exact but for float16 below 2**-25."""
        exact = 1 / 16 <= abs(scale) <= 1 and abs(math.frexp(scale)[0]) == 0.5
        # Found by compiling: in other kernels it runs out of registers, or keeps the unscaled operand as well.
        if current_device(self.problem.device).shared_operands:
            cheap = padded(self.problem.D) <= 64 and self.kind != "backward_onepass"
        else:
            cheap = "q_idx" in self.outer
        before = scaled and exact and cheap
        return {"scaled": scaled and not before, "scaled_before": before, "scale": repr(scale)}

    def render(self, template: str, name: str, configs: Sequence[Config], values: dict[str, Any]) -> str:
        axes = self.axes
        constants = configs[0].constants(axes)
        text = source(template).render(
            name=name,
            parameters=", ".join(
                [*self.arguments.names, *(f"{constant}: tl.constexpr" for constant in constants)]
            ),
            arguments=", ".join([*self.arguments.names, *constants]),
            axes=axes,
            **values,
        )
        decorators: list[tuple[Callable, tuple[Any, ...]]] = []
        if len(configs) > 1:
            decorators.append((timing.keep_winner, (self.timed_as, current_device(self.problem.device).key)))
        if self.kind:
            decorators.append(
                (
                    fallback_configs.or_next,
                    (self.kind, [config.launch(axes) for config in self.spare], self.asked_for),
                )
            )
        imports = "\n".join(f"from {f.__module__} import {f.__name__}" for f, _ in decorators)
        lines = "\n".join(f"@{f.__name__}{arguments!r}" for f, arguments in decorators)
        return text.replace(
            "<HEURISTICS>", f"{imports}\n\n{lines}\n<HEURISTICS>" if decorators else "<HEURISTICS>"
        )


def softmax_values(builder: Builder, call: Any) -> dict[str, Any]:
    """What the templates that use softmax.jinja are given."""
    scale = float(call.scale)
    score_mod, mask_mod = builder.inline("score"), builder.inline("mask")
    # Otherwise the scale is part of the exponent, which a negative one would turn around.
    scaled = score_mod is not None or scale <= 0
    return {
        **builder.common(),
        **{name: builder.tensor(name, realized(getattr(call, name))) for name in ("query", "key", "value")},
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "hoisted": builder.hoisted,
        **builder.scaling(scaled, scale),
        "to_log2": repr(LOG2_E if scaled else LOG2_E * scale),
        "to_natural": repr(1.0 if scaled else scale),
    }


def first_choice(kind: str, problem: AttentionProblem) -> Config:
    """The config that a kind of kernel has where nothing is asked for."""
    return candidates(*TABLES[kind], current_device(problem.device), shape_of(problem, kind))[0][0]


def refused_hint(kind: str, problem: AttentionProblem) -> str | None:
    """Why what hints ask for is not used."""
    first = first_choice(kind, problem)
    wanted = hinted(first, kind, problem.options.hinted)
    reason = refused_config(kind, wanted, problem) if wanted != first else None
    return None if reason is None else f"{kind}: {describe(wanted)} was asked for: {reason}"


def refused_config(kind: str, config: Config, problem: AttentionProblem) -> str | None:
    """Why a config cannot be used."""
    if kind == "backward_onepass" and torch.are_deterministic_algorithms_enabled():
        return "adds to d(query) by atomics, which use_deterministic_algorithms rules out"
    if axis := without_choice(kind, config):
        return f"the kernel has no choice of {axis}"
    return misfit(config, TABLES[kind][1], current_device(problem.device), shape_of(problem, kind))


def shape_of(problem: AttentionProblem, kind: str, **counts: int) -> Shape:
    """What configs are chosen by; `counts` are of what mods load, keep and add."""
    q_block, kv_block = problem.blocks or (None, None)

    def divides(block: int | None, length: Any) -> int | None:
        # One block that holds everything can be cut into tiles of any size.
        return None if block is not None and one_block(problem, block, length) else block

    shape = Shape(
        padded(problem.D),
        padded(problem.V),
        problem.dtype.itemsize,
        divides(q_block, problem.M),
        # A step over scattered keys may take several tiles.
        PIECE if problem.scattered and kind in HOLD_QUERIES else divides(kv_block, problem.N),
        **counts,
        aligned=problem.aligned,
        exact=dot_precision(problem.dtype) == "ieee" and current_device(problem.device).nvidia,
        mapped=problem.map_tiles is not None,
    )
    if kind == "decode":
        shape = shape._replace(rows=packed(problem, shape, current_device(problem.device)).rows)
    return shape


def one_block(problem: AttentionProblem, block: int, length: Any) -> bool:
    """Whether one block holds all there is, wherever it lies."""
    return problem.map_tiles is None and V.graph.sizevars.statically_known_leq(length, block)


def walked(problem: AttentionProblem) -> tuple[Any, Any, Any]:
    """The batches, queries and keys that kernels go through. With a map that is one batch of whole blocks."""
    if problem.map_tiles is None:
        return problem.B, problem.M, problem.N
    return 1, *(count * block for count, block in zip(problem.map_tiles, problem.blocks, strict=True))


def tiles(length: Any, tile: int) -> Any:
    return FloorDiv(sympy.sympify(length) + tile - 1, tile)


def padded(head_dim: Any) -> int:
    """A head dim as the dot takes it: a power of two, at least 16."""
    return max(16, 1 << (int(head_dim) - 1).bit_length())


def one_kv_batch(problem: AttentionProblem) -> bool:
    """Whether all batches share one of keys and values."""
    return problem.B_kv == 1


def dot_precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype != torch.float32 or compat.allows_tf32() else "ieee"


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
