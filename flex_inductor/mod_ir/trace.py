"""From a score_mod or mask_mod to FX graphs: its value, and its joint graph for the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import compat
from . import errors
from .apart import apart_from_surrounding_trace
from .arguments import JOINT_LANES, example_lanes, is_number
from .indexing import LaneIndexing
from .tracer import Tracer
from .writes import storage_of, writes_to_views


def fake_like(capture: Any, fake_mode: FakeTensorMode) -> Any:
    if not isinstance(capture, Tensor):
        return capture
    with fake_mode:
        return torch.empty_strided(
            capture.size(), capture.stride(), dtype=capture.dtype, device=capture.device
        )


def trace_value(
    mod: Callable, lanes: Sequence[str], query: Tensor, captures: Sequence[Any]
) -> fx.GraphModule:
    """The FX graph of `mod(*lanes, *captures)`, which holds aten ops only."""

    tracer = Tracer()
    run = tracer.keeping_lines(mod)

    def value(*args):
        # As in differentiation, so that a mod that asks does the same.
        with torch.enable_grad(), LaneIndexing():
            return run(*args)

    return trace_function(tracer, value, lanes, query, captures)


def trace_joint(
    score_mod: Callable, query: Tensor, captures: Sequence[Any], wanted: Sequence[bool]
) -> fx.GraphModule:
    """The FX graph `(score, b, h, q_idx, kv_idx, grad, *captures) -> (d score, *d captures)`.

    `score_mod` itself is differentiated, not its graph: custom autograd.Functions keep their backward.
    `wanted` is for the score and each capture. A capture that is not wanted, or that the score does not depend
    on, has None for its gradient; d score is then zero.
    """

    tracer = Tracer()
    run = tracer.keeping_lines(score_mod)

    def joint(score, b, h, q_idx, kv_idx, grad, *captures):
        inputs = [
            tensor.detach().requires_grad_() if want else tensor
            for tensor, want in zip((score, *captures), wanted, strict=True)
        ]
        sources = [tensor for tensor, want in zip(inputs, wanted, strict=True) if want]
        grads: Sequence[Tensor | None] = (None,) * len(sources)
        with torch.enable_grad(), LaneIndexing():
            new_score = run(inputs[0].clone(), b, h, q_idx, kv_idx, *inputs[1:])
            errors.check_mod_result("score_mod", new_score)
            if new_score.requires_grad:
                grads = torch.autograd.grad(new_score, sources, grad.to(new_score.dtype), allow_unused=True)
        found = iter(grads)
        d_score, *d_captures = (next(found) if want else None for want in wanted)
        return torch.zeros_like(score) if d_score is None else d_score, *d_captures

    return trace_function(tracer, joint, JOINT_LANES, query, captures)


def trace_function(
    tracer: Tracer, fn: Callable, lanes: Sequence[str], query: Tensor, captures: Sequence[Any]
) -> fx.GraphModule:
    tensors = [query, *(c for c in captures if isinstance(c, Tensor))]
    with apart_from_surrounding_trace():
        fake_mode = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            args = example_lanes(query, lanes)
        args += [fake_like(capture, fake_mode) for capture in captures]
        with fake_mode, numbers_known():
            graph = tracer.trace_call(fn, args)
            if writes_to_views(graph):
                module, tracer = fx.GraphModule(tracer.root, graph), Tracer()
                graph = tracer.trace_call(torch.func.functionalize(tracer.keeping_lines(module)), args)
        _tidy(graph, tracer.root, len(lanes))
        return fx.GraphModule(tracer.root, graph)


@contextlib.contextmanager
def numbers_known() -> Iterator[None]:
    """Around a trace of a mod: raises if the mod computes with a changing number of a surrounding trace."""
    try:
        yield
    except RuntimeError as error:
        if not compat.is_untraced_number(error):
            raise
        raise errors.number_in_mod() from error


_COPIES = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh_copy.default,
)


def _out_of_place(target: Any) -> Any:
    """For the in-place form of a pointwise op, such as add_, the form that returns its result; else None."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    returning = getattr(packet, target._overloadname, None)
    # The in-place form itself is not always tagged: masked_fill_ is not.
    pointwise = torch.Tag.pointwise in getattr(returning, "tags", ()) or name in ("fill_", "zero_", "copy_")
    return returning if pointwise else None


def _tidy(graph: fx.Graph, root: torch.nn.Module, lanes: int) -> None:
    """Drop leftovers of tracing: copies, 0-d constants kept as attributes, writes to a lane's own values."""
    captures = [node for node in graph.nodes if node.op == "placeholder"][lanes:]
    for node in list(graph.nodes):
        if node.target in _COPIES or (
            node.target is torch.ops.aten.clone.default and is_number(node.meta["val"])
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "get_attr":
            constant = getattr(root, node.target)
            node.meta.setdefault("val", constant)
            if not is_number(constant):
                continue
            with graph.inserting_before(node):
                literal = graph.call_function(
                    torch.ops.aten.full.default,
                    ([], constant.item()),
                    {"dtype": constant.dtype, "device": constant.device},
                )
            literal.meta["val"] = constant
            node.replace_all_uses_with(literal)
            graph.erase_node(node)
        elif (returning := _out_of_place(node.target)) and storage_of(node.args[0]) not in captures:
            node.target = returning
    graph.eliminate_dead_code()
