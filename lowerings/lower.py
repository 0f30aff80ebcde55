"""Tells Inductor how to lower the two ops. Imported once Inductor's own lowerings are."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch._dynamo.utils import dynamo_timed
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from flex_inductor.mod_ir.split import programs
from flex_inductor.op import AttentionCall, BackwardCall, attention, attention_backward

from . import registry
from .call import LoweredCall
from .decision_log import record
from .observing import observer
from .problem import AttentionProblem
from .verified import verified

if TYPE_CHECKING:  # a circle at run time: it imports this module
    from torch._inductor.graph import GraphLowering

# Inductor warns that it treats all subgraphs of an op alike, which is right for ours.
warnings.filterwarnings("ignore", message="Please add support for subgraph args to function flex_inductor")


@register_lowering(attention, type_promotion_kind=None)
def _forward(*args: Any) -> Any:
    call = AttentionCall.read(*args)
    outputs = tuple(name for name in ("lse", "max_scores") if getattr(call.options, name))
    outputs += call.options.more
    with dynamo_timed("flex_inductor.lower"):
        return _lower(call, "forward", outputs)


@register_lowering(attention_backward, type_promotion_kind=None)
def _backward(*args: Any) -> Any:
    call = BackwardCall.read(*args)
    with dynamo_timed("flex_inductor.lower"):
        return _lower(call, "backward", call.wants)


def _lower(op_call: AttentionCall | BackwardCall, direction: str, outputs: tuple[str, ...]) -> Any:
    from .buffers import realized  # imports Inductor's lowerings, which import this module

    given = {name: getattr(op_call, name, None) for name in ("query", "key", "value", "grad_out")}
    tensors = {name: realized(tensor) for name, tensor in given.items() if tensor is not None}
    call = LoweredCall(**op_call._replace(**tensors)._asdict())
    inputs: Any = call.inputs
    schedule = inputs.schedule
    problem = AttentionProblem(
        direction=direction,
        device=call.query.get_device_or_error(),
        dtype=call.query.get_dtype(),
        kv_dtype=call.key.get_dtype(),
        **_sizes(call),
        aligned=all(map(_aligned, tensors.values())),
        schedule=schedule.form if schedule else None,
        blocks=(int(schedule.q_block), int(schedule.kv_block)) if schedule else None,
        heads_alike=schedule is None or schedule.grids[1] == 1,
        lists_queries=schedule is not None and schedule.lists_queries,
        map_tiles=tuple(lines.get_size()[0] for lines in inputs.tile_map) if inputs.tile_map else None,
        programs=programs(_graph(call.score_mod), _graph(call.mask_mod), _graph(call.joint), guarded=False),
        inputs=tuple(inputs.given()),
        score_captures=_metadata(inputs.score_captures),
        mask_captures=_metadata(inputs.mask_captures),
        outputs=outputs,
        options=call.options,
    )
    route, decision = registry.decide(problem, registry.ROUTES if inputs.ring is None else registry.RING)
    before = len(V.graph.operations)
    results, kernels = route.lower(problem, call)
    decision = decision._replace(kernels=tuple(kernels))
    observer().lowered(call, problem, decision, V.graph.operations[before:])
    if observer().records:
        _bring_along(V.graph, record(decision, V.graph.current_node.name, problem.options.number))
    return verified(problem, call, results) if problem.options.verify else results


def _bring_along(graph: GraphLowering, line: str) -> None:
    """Have the generated module run `line` when it is loaded, also by a process that finds it in a cache."""
    init_wrapper_code = graph.init_wrapper_code

    def with_line(*args: Any, **kwargs: Any) -> None:
        init_wrapper_code(*args, **kwargs)
        if not graph.cpp_wrapper:
            graph.wrapper_code.add_import_once(line)

    graph.init_wrapper_code = with_line  # type: ignore[method-assign]


def _sizes(call: LoweredCall) -> dict[str, Any]:
    B, H, M, D = call.query.get_size()
    B_kv, K, N, V = call.value.get_size()
    return {"B": B, "B_kv": B_kv, "H": H, "K": K, "M": M, "N": N, "D": D, "V": V}


def _aligned(tensor: Any) -> bool:
    """Whether the last dimension is contiguous and begins at a multiple of 16 bytes wherever it begins."""
    *outer, inner = tensor.get_stride()
    begins = [*outer, tensor.get_size()[-1], tensor.get_layout().offset]
    known = V.graph.sizevars.statically_known_multiple_of
    aligned = all(known(elements * tensor.get_dtype().itemsize, 16) for elements in begins)
    return inner == 1 and aligned and tensor.get_name() not in V.graph.unaligned_buffers


def _graph(subgraph: ir.Subgraph | None) -> Any:
    return None if subgraph is None else subgraph.graph_module


def _metadata(captures: Any) -> tuple:
    return tuple((capture.get_dtype(), tuple(capture.get_size())) for capture in captures)
