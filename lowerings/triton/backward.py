"""The fused backward: one kernel for d(query) and captured tensors and one for d(key) and d(value), or one for all.

Wide heads have a kernel for d(key) and one for d(value): the sums for both would leave no registers. One pass has
five products for a tile where two have seven, but adds to d(query) in memory, by atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V

from ..buffers import layout_of, realized
from ..lanes import Mods, mods, programs
from ..problem import AttentionProblem
from . import captured
from .configs import LARGEST_TILE, Config
from .kernel import KernelCall, empty
from .kernel_builder import (
    LOG2_E,
    Builder,
    Inline,
    one_kv_batch,
    tiles,
    unwritten,
    walked,
)

aten = torch.ops.aten

# Below this many instances the query heads of one KV head get instances of their own.
ENOUGH_INSTANCES = 512

WIDEST_TOGETHER = 128  # head dim at which one kernel has registers for d(key) and d(value)

ONE_PASS = "backward_onepass"


def lower(problem: AttentionProblem, call: Any) -> tuple[Any, ...]:
    found = mods(programs(problem), call.inputs)
    tensors = {name: realized(getattr(call, name)) for name in ("query", "key", "value")}
    tensors["exponent"] = _exponent(call)
    tensors["grad_out"] = _grad_out(problem, call)
    tensors["delta"] = _delta(call)
    fakes = dict(zip(("d_query", "d_key", "d_value"), V.graph.current_node.meta["val"], strict=False))
    grads: dict[str, Any] = dict.fromkeys(fakes)
    joint = found.joint
    of_keys = kinds(problem)
    one_pass = ONE_PASS in of_keys
    rows = "kv_idx" if one_pass else "q_idx"
    sums = captured.sums(joint, problem, rows) if joint else []
    if not one_pass:
        if any(total.how == "units" for total in sums):
            measured = captured.magnitudes(sums, problem)
            _dq(problem, call, found, tensors, None, measured)
            sums = captured.with_units(sums, measured)
        if "query" in problem.outputs or sums:
            if "query" in problem.outputs:
                grads["d_query"] = unwritten(problem, fakes["d_query"], problem.result_dtype, 0.0)
            _dq(problem, call, found, tensors, grads["d_query"], sums)
    for kind, wanted in of_keys.items():
        grads.update(_dkdv(problem, call, found, tensors, fakes, kind, wanted, sums if one_pass else ()))
    d_captures: Sequence[Any] = (None,) * len(call.inputs.score_captures)
    if joint is not None:
        d_captures = joint.gradients([*map(captured.total, sums)])
    return (*grads.values(), tuple(d_captures))


def kinds(problem: AttentionProblem) -> dict[str, list[str]]:
    """The kernels that hold a tile of keys, each with the inputs whose gradients it gives; `configs` may name one."""
    asked = {kernel for kernel, _ in problem.options.configs}
    wanted: list[str] = [name for name in ("key", "value") if name in problem.outputs]
    if ONE_PASS in asked and {"query", "key"} <= set(problem.outputs):
        return {ONE_PASS: wanted}
    apart = {"backward_dk": ["key"], "backward_dv": ["value"]}
    wide = max(problem.D, problem.V) > WIDEST_TOGETHER and "backward_dkdv" not in asked
    if wide or asked & apart.keys():
        return {kind: names for kind, names in apart.items() if names[0] in wanted}
    return {"backward_dkdv": wanted} if wanted else {}


def _grad_out(problem: AttentionProblem, call: Any) -> Any:
    if call.grad_out is not None:
        return realized(call.grad_out)
    size = [*call.query.get_size()[:3], problem.V]
    zeros = lowerings[aten.full](size, 0, dtype=problem.dtype, device=problem.device)
    return realized(zeros)


def _exponent(call: Any) -> Any:
    """[B, H, whole tiles]: the logsumexp in base two, which is subtracted from scores; inf for rows without live
    lanes and beyond the last, so that their weights are 0."""
    nothing = lowerings[aten.eq](call.lse, float("-inf"))
    finite = lowerings[aten.where](nothing, float("inf"), call.lse)
    return _in_whole_tiles(lowerings[aten.mul](finite, LOG2_E), float("inf"))


def _in_whole_tiles(rows: Any, beyond: float) -> Any:
    """[B, H, M] with as many more rows as the largest tile may take."""
    M = rows.get_size()[2]
    return realized(lowerings[aten.constant_pad_nd](rows, [0, sympy.Mod(-M, LARGEST_TILE)], beyond))


def _delta(call: Any) -> Any:
    """[B, H, whole tiles]: what the gradient of the softmax subtracts in each row."""
    parts = []
    if call.grad_out is not None:
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
    call: Any,
    found: Mods,
    tensors: dict[str, Any],
    d_query: Any,
    sums: Sequence[captured.Sum],
) -> None:
    builder = Builder(problem, found, ("b", "h", "q_idx"), call.inputs.tile_map)
    batches, queries, _ = walked(problem)
    score_mod, mask_mod = builder.inline("score"), builder.inline("mask")
    joint, placed = _joint(builder, found, sums)
    values = {
        **_values(builder, call, tensors, score_mod, mask_mod, joint),
        "walks": builder.walks(call, "keys"),
        "wants": [] if d_query is None else ["d_query"],
        "d_query": None if d_query is None else builder.tensor("d_query", d_query, written=True),
        "sums": placed,
        "H": builder.size(problem.H),
    }
    values["launch"] = launch = builder.launch(
        f"tl.cdiv({builder.size(queries)}, BLOCK_M)", problem.H, batches
    )
    measuring = any(total.how == "magnitude" for total in sums)
    kind = "backward_magnitudes" if measuring else "backward_dq"
    configs = builder.configs(kind)
    KernelCall(
        kind,
        lambda name: builder.render("backward_dq.jinja", name, configs, values),
        builder.arguments,
        configs,
        builder.axes,
        lambda config: launch.grid(tiles(queries, config.block_m), problem.H, batches),
        accumulated=_accumulated(placed),
        spare=builder.spare,
    )


def _dkdv(
    problem: AttentionProblem,
    call: Any,
    found: Mods,
    tensors: dict[str, Any],
    fakes: dict[str, Any],
    kind: str,
    wanted: Sequence[str],
    sums: Sequence[captured.Sum],
) -> dict[str, Any]:
    if "key" not in wanted:  # the values' gradient needs none of the score's
        found = found._replace(joint=None)
    builder = Builder(problem, found, ("b", "h", "kv_idx"), call.inputs.tile_map)
    batches, _, keys = walked(problem)
    mapped = problem.map_tiles is not None
    score_mod, mask_mod = builder.inline("score"), builder.inline("mask")
    joint, placed = _joint(builder, found, sums)
    configs = builder.configs(kind)
    heads = _heads_in_an_instance(problem, configs[0])
    parts = int(problem.H) // heads
    summed = mapped or parts != problem.K or (one_kv_batch(problem) and problem.B != 1)
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
    if kind == ONE_PASS:
        size = [problem.B, problem.H, problem.M, problem.D]
        outputs["d_query"] = captured.zeros(size, torch.float32, problem)
    values = {
        **_values(builder, call, tensors, score_mod, mask_mod, joint),
        **{"d_key": None, "d_value": None},
        "d_query_sum": builder.tensor("d_query_sum", outputs["d_query"], written=True)
        if kind == ONE_PASS
        else None,
        "sums": placed,
        **written,
        "walks": builder.walks(call, "queries"),
        "wants": list(written),
        "heads": heads,
    }
    values["launch"] = launch = builder.launch(f"tl.cdiv({builder.size(keys)}, BLOCK_N)", parts, batches)
    KernelCall(
        kind,
        lambda name: builder.render("backward_dkdv.jinja", name, configs, values),
        builder.arguments,
        configs,
        builder.axes,
        lambda config: launch.grid(tiles(keys, config.block_n), parts, batches),
        accumulated=[
            *_accumulated(placed),
            *(["d_query_sum"] if kind == ONE_PASS else []),
        ],
        spare=builder.spare,
    )
    if summed:
        outputs |= {name: _sum_parts(outputs[name], problem) for name in written}
    if kind == ONE_PASS:
        d_query = lowerings[aten.mul](outputs["d_query"], float(call.scale))
        outputs["d_query"] = to_dtype(d_query, problem.result_dtype)
    return outputs


def _joint(
    builder: Builder, found: Mods, sums: Sequence[captured.Sum]
) -> tuple[Inline | None, list[captured.Placed]]:
    """The joint program, and what it adds to captured tensors if that is to be done in this kernel."""
    placed: list[captured.Placed] = []

    def place(joint: Inline) -> None:
        placed.extend(captured.place(builder, joint, sums, found.joint.program))

    return builder.inline("joint", place if sums else None), placed


def _accumulated(placed: Sequence[captured.Placed]) -> list[str]:
    return [total.name for total in placed if total.how in ("atomics", "units")]


def _heads_in_an_instance(problem: AttentionProblem, config: Config) -> int:
    """How many of the query heads that share a KV head: all if there are instances enough even so, else one."""
    group = int(problem.H) // int(problem.K)
    batches, _, keys = walked(problem)
    instances = tiles(keys, config.block_n) * problem.K * batches
    few = V.graph.sizevars.optimization_hint(instances, fallback=0) < ENOUGH_INSTANCES
    return 1 if few else group


def _sum_parts(parts: Any, problem: AttentionProblem) -> Any:
    """[B or 1, K, N, D] of the call's dtype from one part for each batch and some query heads."""
    B, count, N, D = parts.get_size()
    grouped = lowerings[aten.view](parts, [B, problem.K, int(count) // int(problem.K), N, D])
    total = lowerings[aten.sum](grouped, [2])
    if one_kv_batch(problem):
        total = lowerings[aten.sum](total, [0], True)
    return to_dtype(total, problem.result_dtype)


def _values(
    builder: Builder,
    call: Any,
    tensors: dict[str, ir.IRNode],
    score_mod: Inline | None,
    mask_mod: Inline | None,
    joint: Inline | None,
) -> dict[str, Any]:
    """What both templates are given."""
    scale = float(call.scale)
    return {
        **builder.common(),
        **{name: builder.tensor(name, tensor) for name, tensor in tensors.items()},
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "joint": joint,
        "hoisted": builder.hoisted,
        **builder.scaling(score_mod is not None, scale),
        "to_log2": repr(LOG2_E if score_mod else LOG2_E * scale),
    }
