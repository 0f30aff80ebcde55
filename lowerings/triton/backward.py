"""The fused backward: one kernel for d(query) and captured tensors and one for d(key) and d(value).

Wide heads have a kernel for d(key) and one for d(value): the sums for both would leave no registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V

from ..buffers import layout_of, realized
from ..call import LoweredCall
from ..decision import Choice
from ..lanes import Mods, mods, programs
from ..problem import AttentionProblem
from . import captured
from .configs import LARGEST_TILE, Config
from .device import current_device
from .fitting import chosen
from .kernel import empty
from .kernel_builder import LOG2_E, Builder, tiles, unwritten, walked

aten = torch.ops.aten

# Below this many instances a multiprocessor the query heads of one KV head get instances of their own.
ENOUGH_INSTANCES = 16

WIDEST_TOGETHER = 128  # head dim at which one kernel has registers for d(key) and d(value)


def lower(problem: AttentionProblem, call: LoweredCall) -> tuple[tuple[Any, ...], list[Choice]]:
    found = mods(programs(problem), call.inputs)
    tensors = {name: realized(getattr(call, name)) for name in ("query", "key", "value")}
    tensors["lse"] = _lse(call, base_two=found.score is None)
    tensors["grad_out"] = _grad_out(problem, call)
    tensors["delta"] = _delta(call)
    if call.inputs.grad_entropy is not None:
        tensors["grad_entropy"] = _in_whole_tiles(call.inputs.grad_entropy, 0.0)
    fakes = dict(zip(("d_query", "d_key", "d_value"), V.graph.current_node.meta["val"], strict=False))
    grads: dict[str, Any] = dict.fromkeys(fakes)
    joint = found.joint
    sums = captured.sums(joint, problem) if joint else []
    choices: list[Choice] = []
    if any(total.how == "units" for total in sums):
        measured = captured.magnitudes(sums, problem)
        choices += _dq(problem, call, found, tensors, None, measured)
        sums = captured.with_units(sums, measured)
    if "query" in problem.outputs or sums:
        if "query" in problem.outputs:
            grads["d_query"] = unwritten(problem, fakes["d_query"], problem.result_dtype, 0.0)
        choices += _dq(problem, call, found, tensors, grads["d_query"], sums)
    for kind, wanted in kinds(problem).items():
        of_keys, made = _dkdv(problem, call, found, tensors, fakes, kind, wanted)
        grads |= of_keys
        choices += made
    d_captures: Sequence[Any] = (None,) * len(call.inputs.score_captures)
    if joint is not None:
        d_captures = joint.gradients([*map(captured.total, sums)])
    return (*grads.values(), tuple(d_captures)), choices


def kinds(problem: AttentionProblem) -> dict[str, list[str]]:
    """The kernels that hold a tile of keys, each with the inputs whose gradients it gives; `configs` may name one."""
    asked = {kernel for kernel, _ in problem.options.configs}
    wanted: list[str] = [name for name in ("key", "value") if name in problem.outputs]
    apart = {"backward_dk": ["key"], "backward_dv": ["value"]}
    wide = max(problem.D, problem.V) > WIDEST_TOGETHER and "backward_dkdv" not in asked
    if wide or asked & apart.keys():
        return {kind: names for kind, names in apart.items() if names[0] in wanted}
    return {"backward_dkdv": wanted} if wanted else {}


def _grad_out(problem: AttentionProblem, call: LoweredCall) -> Any:
    if call.grad_out is not None:
        return realized(call.grad_out)
    size = [*call.query.get_size()[:3], problem.V]
    zeros = lowerings[aten.full](size, 0, dtype=problem.dtype, device=problem.device)
    return realized(zeros)


def _lse(call: LoweredCall, base_two: bool) -> Any:
    """[B, H, whole tiles]: the logsumexp, subtracted from scores (`power` in tiles.jinja); inf for rows without
    live lanes and beyond the last, so that their weights are 0."""
    nothing = lowerings[aten.eq](call.lse, float("-inf"))
    finite = lowerings[aten.where](nothing, float("inf"), call.lse)
    scaled = lowerings[aten.mul](finite, LOG2_E) if base_two else finite
    return _in_whole_tiles(scaled, float("inf"))


def _in_whole_tiles(rows: Any, beyond: float) -> Any:
    """[B, H, M], padded by the rows that the largest tile may read beyond."""
    M = rows.get_size()[2]
    return realized(lowerings[aten.constant_pad_nd](rows, [0, sympy.Mod(-M, LARGEST_TILE)], beyond))


def _delta(call: LoweredCall) -> Any:
    """[B, H, whole tiles]: what the gradient of the softmax subtracts in each row."""
    parts = []
    if call.out is not None and call.grad_out is not None:
        products = lowerings[aten.mul](
            to_dtype(call.out, torch.float32), to_dtype(call.grad_out, torch.float32)
        )
        parts.append(lowerings[aten.sum](products, [-1]))
    if call.grad_lse is not None:
        parts.append(lowerings[aten.neg](call.grad_lse))
    delta = parts[0] if len(parts) == 1 else lowerings[aten.add](*parts)
    return _in_whole_tiles(delta, 0.0)


def _dq(
    problem: AttentionProblem,
    call: LoweredCall,
    found: Mods,
    tensors: dict[str, Any],
    d_query: Any,
    sums: Sequence[captured.Sum],
) -> list[Choice]:
    builder = Builder(problem, call, found, ("b", "h", "q_idx"))
    batches, queries, _ = walked(problem)
    inlined, placed = builder.inline(), list[captured.Placed]()
    if sums:
        assert found.joint is not None
        inlined, placed = captured.place(builder, inlined, sums, found.joint.program)
    values = {
        **builder.values(inlined, tensors, scaled=inlined.score is not None),
        "walks": builder.walks("keys"),
        "wants": [] if d_query is None else ["d_query"],
        **builder.written({"d_query": d_query}),
        "sums": placed,
    }
    launched = builder.launch(queries, problem.H, batches, "m")
    measuring = any(total.how == "magnitude" for total in sums)
    kind = "backward_magnitudes" if measuring else "backward_dq"
    return builder.add(
        "backward_dq.jinja",
        chosen(problem, kind, inlined.counts + captured.counts(placed)),
        values,
        launched,
        [total.name for total in placed if total.how in ("atomics", "units")],
    )


def _dkdv(
    problem: AttentionProblem,
    call: LoweredCall,
    found: Mods,
    tensors: dict[str, Any],
    fakes: dict[str, Any],
    kind: str,
    wanted: Sequence[str],
) -> tuple[dict[str, Any], list[Choice]]:
    if "key" not in wanted:  # the values' gradient needs none of the score's
        found = found._replace(joint=None)
    builder = Builder(problem, call, found, ("b", "h", "kv_idx"))
    batches, _, keys = walked(problem)
    mapped = problem.map_tiles is not None
    inlined = builder.inline()
    made = chosen(problem, kind, inlined.counts)
    heads = _heads_in_an_instance(problem, made.configs[0])
    parts = int(problem.H) // heads
    summed = mapped or parts != problem.K or (problem.B_kv == 1 and problem.B != 1)
    outputs, written = {}, {}
    for name, source in (("d_key", "key"), ("d_value", "value")):
        if source not in wanted:
            continue
        width = problem.D if source == "key" else problem.V
        if mapped:  # rows may be in no tile
            outputs[name] = captured.zeros([problem.B_kv, parts, problem.N, width], torch.float32, problem)
        elif summed:
            size = [problem.B, parts, problem.N, width]
            outputs[name] = empty(size, None, torch.float32, problem.device)
        else:
            outputs[name] = empty(*layout_of(fakes[name]), problem.result_dtype, problem.device)
        written[name] = builder.tensor(name, outputs[name], written=True)
    values = {
        **builder.values(inlined, tensors, scaled=inlined.score is not None),
        **written,
        "walks": builder.walks("queries"),
        "wants": list(written),
        "heads": heads,
    }
    choices = builder.add("backward_dkdv.jinja", made, values, builder.launch(keys, parts, batches, "n"))
    if summed:
        outputs = {name: _sum_parts(output, problem) for name, output in outputs.items()}
    return outputs, choices


def _heads_in_an_instance(problem: AttentionProblem, config: Config) -> int:
    """How many of the query heads that share a KV head: all if there are instances enough even so, else one."""
    group = int(problem.H) // int(problem.K)
    batches, _, keys = walked(problem)
    instances = tiles(keys, config.block_n) * problem.K * batches
    enough = ENOUGH_INSTANCES * current_device(problem.device).multiprocessors
    few = V.graph.sizevars.optimization_hint(instances, fallback=0) < enough
    return 1 if few else group


def _sum_parts(parts: Any, problem: AttentionProblem) -> Any:
    """[B or 1, K, N, D] of the call's dtype from one part for each batch and some query heads."""
    B, count, N, D = parts.get_size()
    grouped = lowerings[aten.view](parts, [B, problem.K, int(count) // int(problem.K), N, D])
    total = lowerings[aten.sum](grouped, [2])
    if problem.B_kv == 1:
        total = lowerings[aten.sum](total, [0], True)
    return to_dtype(total, problem.result_dtype)
