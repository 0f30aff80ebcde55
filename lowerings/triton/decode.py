"""Few queries: heads that share a KV head share a tile. If that makes too few instances, each takes a part of the keys,
and a second kernel combines the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.virtualized import V

from ..call import LoweredCall
from ..choice import demanded
from ..decision import Choice
from ..hints import splits_asked
from ..lanes import Mods
from ..problem import AttentionProblem
from .configs import Config
from .device import current_device
from .fitting import Chosen, chosen, few, first_choice, packed, queries_of, refused_config, shape_of
from .kernel import empty
from .kernel_builder import Builder, further, softmax_values, tiles, walked

# Instances that keep a multiprocessor busy.
INSTANCES_EACH = 2
# From this many keys on, a second kernel is worth its launch.
WORTH_SPLITTING = 256


def serves(problem: AttentionProblem) -> bool:
    """Whether splitting the keys fills the device, or packed heads have fewer rows each than the forward's tiles."""
    if not few(problem) or (problem.blocks is not None and queries_of(problem) > problem.blocks[0]):
        return False
    config = first_choice("decode", problem)
    if refused_config("decode", config, problem) is not None:
        return False
    heads = packed(problem, shape_of(problem, "decode")).heads
    if splits(problem, config, heads) > 1 or (problem.map_tiles and queries_of(problem) % 16):
        return True
    tile = first_choice("forward", problem).block_m
    asked = {"BLOCK_M", "fwd_BLOCK_M"} & problem.options.hinted.keys()
    if asked or demanded(problem, "forward") is not None:
        return False
    return config.block_m < heads * tile * int(tiles(queries_of(problem), tile))


def splits(problem: AttentionProblem, config: Config, heads: int) -> int:
    """The number of parts asked for, or that fills the device with that many heads in an instance; no part is smaller
    than a tile."""
    if asked := splits_asked(problem):
        return asked
    hint = V.graph.sizevars.optimization_hint
    batches, keys = _batches(problem), hint(walked(problem)[2], fallback=0)
    if problem.map_tiles is not None:
        keys //= max(hint(batches, fallback=1), 1)  # a guess of the tiles that one tile of queries visits
    if keys < WORTH_SPLITTING:
        return 1
    instances = hint(batches * (problem.H // heads), fallback=1)
    # Rounded down: a few more instances than run at once would take a second round, mostly idle.
    wanted = current_device(problem.device).multiprocessors * INSTANCES_EACH // max(instances, 1)
    return max(1, min(wanted, int(tiles(keys, config.block_n)), 128))


def _batches(problem: AttentionProblem) -> Any:
    """The third axis of a launch: batches, or tiles of queries."""
    return problem.B if problem.map_tiles is None else problem.map_tiles[0]


def lower(problem: AttentionProblem, call: LoweredCall, mods: Mods, outputs: dict[str, Any]) -> list[Choice]:
    """Write `outputs`, None for those that nothing reads."""
    builder = Builder(problem, call, mods, ("b", "h", "q_idx"))
    inlined = builder.inline()
    if inlined.mask is not None:
        inlined = inlined._replace(mask=inlined.mask._replace(whole=None))  # a tile has rows of several heads
    values = softmax_values(builder, inlined)
    heads = packed(problem, shape_of(problem, "decode", inlined.counts)).heads
    made = chosen(problem, "decode", inlined.counts)
    count = splits(problem, made.configs[0], heads)
    more = further(outputs)
    written = outputs if count == 1 else _parts(problem, count, more)
    values |= builder.written(written)
    values |= {
        "more": more,
        "walks": builder.walks("keys", "0"),
        "heads": heads,
        "splits": count,
    }
    launched = builder.launch(count, int(problem.H) // heads, _batches(problem))
    choices = builder.add("decode.jinja", made, values, launched)
    if count > 1:
        _combine(problem, call, written, outputs, count)
    return choices


def _parts(problem: AttentionProblem, count: int, more: Sequence[str]) -> dict[str, Any]:
    """Buffers for the instances' results."""
    size = [count, _batches(problem), problem.H, queries_of(problem)]
    of_rows = {"part_peak": torch.float32, "part_total": torch.float32}
    if "entropy" in more:
        of_rows["part_weighted"] = torch.float32
    if "max_indices" in more:
        of_rows["part_largest"] = torch.int32
    return {
        "part_acc": empty([*size, problem.V], None, torch.float32, problem.device),
        **{name: empty(size, None, dtype, problem.device) for name, dtype in of_rows.items()},
    }


def _combine(
    problem: AttentionProblem, call: LoweredCall, parts: dict[str, Any], outputs: dict[str, Any], count: int
) -> None:
    builder = Builder(problem, call, Mods(), ())
    queries = queries_of(problem)
    for name, buffer in parts.items():
        builder.tensor(name, buffer)
    values = {
        **builder.values(builder.inline()),
        **builder.written(outputs),
        "more": further(outputs),
        "splits": count,
    }
    launched = builder.launch(queries, problem.H, _batches(problem))
    builder.add("combine.jinja", Chosen("combine", [Config(1, 1, 4, 1)]), values, launched)
