"""Few queries: the keys are split among programs, and a second kernel puts the parts together."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import V

from ..problem import AttentionProblem
from .build import LN_2, Builder, Mod, softmax_values, tiles
from .configs import Config, current_device
from .kernel import KernelCall, empty

# Queries, times the heads that share a KV head, that one tile takes.
MOST_ROWS = 64
# Programs that a multiprocessor is kept busy with.
PROGRAMS_EACH = 2


def serves(problem: AttentionProblem) -> bool:
    """Whether a tile would hold all queries of a head and leave most multiprocessors without work."""
    sizes = V.graph.sizevars
    if not getattr(problem.M, "is_number", True) or int(problem.M) > MOST_ROWS:
        return False
    if problem.blocks is not None and int(problem.M) > problem.blocks[0]:
        return False
    return sizes.optimization_hint(problem.N, fallback=0) >= 256 and splits(problem, Config(16, 64, 4, 1)) > 1


def heads_in_a_program(problem: AttentionProblem, lists: Any) -> int:
    """All query heads of a KV head, if they fit and share a schedule."""
    group = int(problem.H) // int(problem.K)
    shared = not lists or lists[0].get_size()[1] == 1
    return group if shared and group * int(problem.M) <= MOST_ROWS else 1


def splits(problem: AttentionProblem, config: Config) -> int:
    """How many parts fill the device; none is smaller than a tile."""
    hint = V.graph.sizevars.optimization_hint
    programs = hint(problem.B * problem.K, fallback=1)
    wanted = -(-current_device(problem.device).multiprocessors * PROGRAMS_EACH // max(programs, 1))
    return max(1, min(wanted, hint(tiles(problem.N, config.block_n), fallback=1), 128))


def lower(problem: AttentionProblem, call: Any, mods: dict[str, Mod], outputs: dict[str, Any]) -> None:
    """Write `outputs`, None for what nobody reads."""
    builder = Builder(problem, mods, ("b", "h", "q_idx"))
    lists = call.schedule[2:6]
    heads = heads_in_a_program(problem, lists)
    values = softmax_values(builder, call)
    rows = max(16, 1 << (heads * int(problem.M) - 1).bit_length())
    configs = builder.configs("decode", block_m=rows)
    count = splits(problem, configs[0])
    parts = [count, problem.B, problem.H, problem.M]
    buffers = {
        "part_acc": empty([*parts, problem.V], None, torch.float32, problem.device),
        "part_peak": empty(parts, None, torch.float32, problem.device),
        "part_total": empty(parts, None, torch.float32, problem.device),
    }
    for name, buffer in buffers.items():
        builder.tensor(name, buffer, written=True)
    values |= {
        "walks": builder.walks(lists, "keys"),
        "heads": heads,
        "splits": count,
        "H": builder.size(problem.H),
    }
    KernelCall(
        "decode",
        lambda name: builder.render("decode.jinja", name, configs, values),
        builder.arguments,
        configs,
        lambda config: (count, int(problem.H) // heads, problem.B),
        spare=builder.spare,
    )
    _combine(problem, buffers, outputs, count)


def _combine(problem: AttentionProblem, parts: dict[str, Any], outputs: dict[str, Any], count: int) -> None:
    builder = Builder(problem, {}, ())
    for name, buffer in parts.items():
        builder.tensor(name, buffer)
    values = {
        **builder.common(),
        **{
            name: None if output is None else builder.tensor(name, output, written=True)
            for name, output in outputs.items()
        },
        "splits": count,
        "H": builder.size(problem.H),
        "ln_2": repr(LN_2),
    }
    config = Config(1, 1, 4, 1)
    KernelCall(
        "combine",
        lambda name: builder.render("combine.jinja", name, [config], values),
        builder.arguments,
        [config],
        lambda config: (problem.M, problem.H, problem.B),
    )
