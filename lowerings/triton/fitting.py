"""Which configs a kernel of a call may have: what its shape allows, what hints ask for, what tuning times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._inductor.virtualized import V

from flex_inductor import compat
from flex_inductor.options import NUM_SPLITS
from flex_inductor.visits.places import PIECE

from ..choice import choose, demanded, problem_class
from ..decision import Choice
from ..hints import says_something
from ..problem import AttentionProblem
from .configs import (
    LAST,
    Config,
    Cost,
    Shape,
    axes_of,
    candidates,
    describe,
    estimate,
    misfit,
    without_choice,
)
from .device import Device, current_device
from .tables import TABLES

HOLD_QUERIES = ("forward", "decode", "backward_dq", "backward_magnitudes")  # and walk keys


class Chosen(NamedTuple):
    """The configs of a kernel."""

    kind: str
    configs: Sequence[Config]  # the one to use, or those to time
    axes: Sequence[str] = ()  # along which they may differ
    spare: Sequence[Config] = ()  # tried if the card lacks resources for the chosen one
    asked_for: bool = False  # whether hints chose
    timed_as: tuple[str, str] | None = None  # the class and the device that the fastest is kept for
    choice: Choice | None = None


def chosen(problem: AttentionProblem, kind: str, counts: Mapping[str, int]) -> Chosen:
    """The config for a kind of kernel whose mods load, keep and add so much, or those to time."""
    shape, device = shape_of(problem, kind, counts), current_device(problem.device)
    table, cost = TABLES[kind]
    fitting, rejected = candidates(table, cost, device, shape)
    wanted = hinted(fitting[0], kind, problem.options.hinted)
    asked_for, others = wanted != fitting[0], fitting
    if asked_for:
        fitting = [wanted if misfit(wanted, cost, device, shape) is None else fitting[0]]
        timed: Sequence[Config] = fitting
    else:
        timed = to_time(kind, fitting, [config for config, _ in rejected], cost, device, shape)
    configs, choice = choose(
        problem,
        kind,
        fitting,
        rejected,
        device.key,
        time=None,
        estimate=lambda config: estimate(config, cost, device, shape),
        more=timed[len(fitting) :],
    )
    axes = axes_of(configs)
    spare: list[Config] = []
    if demanded(problem, kind) is None:
        spare = [c for c in others if c not in configs and {*axes}.issuperset(axes_of([c]))]
    if shape.score_adds and "coalesced" not in axes:  # only compiling shows whether layouts forbid it
        axes.append("coalesced")
    timed_as = (problem_class(problem, kind), device.key) if len(configs) > 1 else None
    return Chosen(kind, configs, axes, spare, asked_for, timed_as, choice)


# What decides.


def shape_of(problem: AttentionProblem, kind: str, counts: Mapping[str, int] | None = None) -> Shape:
    """The facts that configs are chosen by; `counts` are of values that mods load, keep and add."""
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
        **(counts or {}),
        aligned=problem.aligned,
        exact=dot_precision(problem.dtype) == "ieee" and current_device(problem.device).nvidia,
        mapped=problem.map_tiles is not None,
        narrow=problem.kv_dtype.itemsize == 1,
    )
    if shape.narrow:  # their scales
        shape = shape._replace(line_loads=shape.line_loads + 2)
    return shape._replace(rows=packed(problem, shape).rows) if kind == "decode" else shape


def one_block(problem: AttentionProblem, block: int, length: Any) -> bool:
    """Whether one block holds everything, wherever it lies."""
    return problem.map_tiles is None and V.graph.sizevars.statically_known_leq(length, block)


def padded(head_dim: Any) -> int:
    """A head dim as the dot takes it: a power of two, at least 16."""
    return max(16, 1 << (int(head_dim) - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype != torch.float32 or compat.allows_tf32() else "ieee"


def first_choice(kind: str, problem: AttentionProblem) -> Config:
    """The config that a kind of kernel has where nothing is asked for."""
    return candidates(*TABLES[kind], current_device(problem.device), shape_of(problem, kind))[0][0]


def refused_config(kind: str, config: Config, problem: AttentionProblem) -> str | None:
    """Why a config cannot be used."""
    if axis := without_choice(kind, config):
        return f"the kernel has no choice of {axis}"
    return misfit(config, TABLES[kind][1], current_device(problem.device), shape_of(problem, kind))


# Few queries: heads that share a KV head share a tile.

MOST_QUERIES = 64  # of one head in a tile
MOST_ROWS = 128  # of several heads


class Packed(NamedTuple):
    heads: int
    rows: int  # of the tile: a power of two


def packed(problem: AttentionProblem, shape: Shape) -> Packed:
    """The most heads of a group for which there is a config, if they visit the same keys."""
    device, (table, cost) = current_device(problem.device), TABLES["decode"]
    queries = queries_of(problem) if few(problem) else 1
    group = int(problem.H) // int(problem.K) if problem.heads_alike else 1
    for heads in range(group, 1, -1):
        tile = Packed(heads, padded(heads * queries))
        if group % heads == 0 and heads * queries <= MOST_ROWS:
            of_tile = shape._replace(rows=tile.rows)
            (first, *_), _ = candidates(table, cost, device, of_tile)
            if misfit(first, cost, device, of_tile) is None:
                return tile
    return Packed(1, padded(queries))


def few(problem: AttentionProblem) -> bool:
    """Whether one tile holds all queries of a head, for every length that the graph serves."""
    known = problem.map_tiles is not None or getattr(problem.M, "is_number", True)
    return known and queries_of(problem) <= MOST_QUERIES


def queries_of(problem: AttentionProblem) -> int:
    """The queries of a head, or of a map's tile."""
    if problem.map_tiles is None:
        return int(problem.M)
    assert problem.blocks is not None
    return problem.blocks[0]


# Torch's hints.

# Field of Config -> the hint's name, without torch's prefixes fwd_ and bwd_. In torch's backward, tiles
# numbered 1 belong to the pass for keys and values, those numbered 2 to the one for queries.
_OF_QUERIES = {"block_m": "BLOCK_M2", "block_n": "BLOCK_N2"}
_OF_KEYS = {"block_m": "BLOCK_M1", "block_n": "BLOCK_N1"}
_TILES = {
    "forward": {"block_m": "BLOCK_M", "block_n": "BLOCK_N"},
    "decode": {"block_n": "BLOCK_N"},
    "backward_dq": _OF_QUERIES,
    "backward_magnitudes": _OF_QUERIES,
    "backward_dkdv": _OF_KEYS,
    "backward_dk": _OF_KEYS,
    "backward_dv": _OF_KEYS,
}
_LAUNCH = {"warps": "num_warps", "stages": "num_stages"}


def hinted(config: Config, kind: str, hints: Mapping[str, Any]) -> Config:
    """`config` with what the hints ask of this kind of kernel; a prefixed hint outranks a plain one."""
    prefix = "bwd_" if kind.startswith("backward") else "fwd_"
    for field, name in (_TILES[kind] | _LAUNCH).items():
        value = hints.get(prefix + name, hints.get(name))
        if value is not None:
            config = config._replace(**{field: int(value)})
    return config


def refused_hint(kind: str, problem: AttentionProblem) -> str | None:
    """Why a hint is not followed."""
    first = first_choice(kind, problem)
    wanted = hinted(first, kind, problem.options.hinted)
    reason = refused_config(kind, wanted, problem) if wanted != first else None
    return None if reason is None else f"{kind}: {describe(wanted)} was asked for: {reason}"


def without_effect(hints: Mapping[str, Any]) -> list[str]:
    """The hints that mean something to torch's kernels and nothing to these."""
    known = {NUM_SPLITS, *(name for names in (*_TILES.values(), _LAUNCH) for name in names.values())}
    return sorted(
        name
        for name, value in hints.items()
        if name.removeprefix("fwd_").removeprefix("bwd_") not in known and says_something(name, value)
    )


# What tuning times.

MOST = 32  # configs; one takes some seconds to compile

ROUGH = 1.3  # as far off as estimates of registers were found to be: the assembler often finds a way

_STAGES = {"amd": (1, 2), "interpreter": (1,)}


def to_time(
    kind: str,
    fitting: Sequence[Config],
    rejected: Sequence[Config],
    cost: Cost,
    device: Device,
    shape: Shape,
) -> list[Config]:
    """Best guess first: `fitting`, their tiles and those `rejected` for registers with other stages, the axes on
    `fitting`, then tiles with 4 or 8 warps."""
    wanted = [config for config in [*fitting, *rejected] if config not in LAST] or [*fitting]
    staged = [c._replace(stages=n) for c in wanted for n in _STAGES.get(device.family, (3, 2, 4, 1))]
    others = [c._replace(descriptors=1) for c in fitting if kind == "forward"]
    others += [c._replace(coalesced=1 - c.coalesced) for c in fitting if shape.score_adds]
    others += [c._replace(warps=4 if c.warps == 8 else 8) for c in staged]
    fit = [c for c in [*staged, *others] if misfit(c, cost, device, shape, ROUGH) is None]
    return [*dict.fromkeys([*fitting, *fit])][:MOST]
