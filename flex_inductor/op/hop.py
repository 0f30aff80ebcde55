"""The two higher-order ops, and how the mods of a call become checked graphs.

`attention` takes both mods as callables (FX graphs once Dynamo has traced them) and the tensors they
capture as inputs. `attention_backward` also takes the joint graph, which `tracing.trace_joint` makes.
What torch's dispatcher, tracers and transforms do with the ops is in `autograd`, `rules` and `flops`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_map_only

from .. import compat, errors
from .call import AttentionCall, BackwardCall
from .lift import LiftedMod, lift
from .tracing import (
    MASK_LANES,
    SCORE_LANES,
    number_beyond,
    number_dtype,
    random_op,
    score_dtype,
    trace_mod,
    written_placeholder,
)


class Attention(HigherOrderOperator):
    """(out, logsumexp, max_scores), the last two per row and in natural logarithm."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = _lift_captures(AttentionCall.read(*args))
        if compat.is_exporting():
            from .saved import save  # which calls this op

            return save(call)
        return super().__call__(*call.wire())


class AttentionBackward(HigherOrderOperator):
    """(d query, d key, d value, (d capture, ...)), None for what needs none."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention_backward", cacheable=True)

    def __call__(self, *args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple]:
        # The pullback of torch.func.vjp may be called once the transform has ended.
        return super().__call__(
            *tree_map_only(Tensor, torch._C._functorch.unwrap_if_dead, BackwardCall.read(*args).wire())
        )


class Refusal(HigherOrderOperator):
    """Only ever met by Dynamo: where it may not break the graph, the user gets this error and not Dynamo's of it."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_refusal")

    def __call__(self, kind: type[errors.FlexError], *args: Any) -> None:
        return super().__call__(kind, *args)


attention = Attention()
attention_backward = AttentionBackward()
refusal = Refusal()


class WrappedMod:
    """A mod changed by a rule, its captures already among the op's inputs."""

    def __init__(self, fn: Callable, names: Sequence[str]):
        self.fn, self.names = fn, tuple(names)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def _lift_captures(call: AttentionCall) -> AttentionCall:
    """Calls from plain Python bring mods that still hold their captures."""
    for field, lanes in (("score", SCORE_LANES), ("mask", MASK_LANES)):
        name = f"{field}_mod"
        mod, captures = getattr(call, name), getattr(call.inputs, f"{field}_captures")
        if mod is None or captures or isinstance(mod, (fx.GraphModule, LiftedMod, WrappedMod)):
            continue
        errors.check_arity(name, mod, lanes)
        lifted, captures = lift(mod, lanes, call.query)
        changed: dict[str, Any] = {name: lifted}
        call = call._replace(**changed).with_inputs(**{f"{field}_captures": captures})
    return call


CAPTURE_NAME = "flex_inductor_capture"  # the key of a placeholder's meta under which Dynamo's rule puts it


def capture_names(mod: Any, count: int) -> tuple[str, ...]:
    """What a person calls the last `count` arguments of `mod`."""
    if isinstance(mod, fx.GraphModule):
        nodes = mod.graph.find_nodes(op="placeholder")
        return tuple(
            node.meta.get(CAPTURE_NAME) or readable_name(node.name) for node in nodes[len(nodes) - count :]
        )
    return getattr(mod, "names", ()) or tuple(f"capture_{i}" for i in range(count))


def readable_name(placeholder: str) -> str:
    """`bias` from Dynamo's l_bias_, `self.table` from l_self_parameters_table_."""
    name = re.sub(r"^[lg]_(.*?)_*$", r"\1", placeholder.lower() if placeholder[:2] == "L_" else placeholder)
    return re.sub(r"_*(parameters|buffers|modules)_+", ".", name)


_CHECKED = "flex_inductor_lane_graph"


def lane_graph(mod: Callable, field: str, query: Tensor, captures: Sequence[Any]) -> fx.GraphModule:
    """`mod` as an FX graph of aten ops, checked: what it returns, and that it only computes."""
    if isinstance(mod, fx.GraphModule) and mod.meta.get(_CHECKED):
        return mod
    lanes = SCORE_LANES if field == "score_mod" else MASK_LANES
    graph = trace_mod(mod, lanes, query, captures)
    (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    errors.check_mod_result(field, output.meta["val"] if isinstance(output, fx.Node) else output)
    check_ops(graph, field, (*lanes, *capture_names(mod, len(captures))))
    return mark_checked(graph)


def check_ops(graph: fx.GraphModule, field: str, names: Sequence[str]) -> None:
    """Refuse what must not happen anew for every score; `names` are those of the graph's arguments."""
    if written := written_placeholder(graph):
        position, op = written
        raise errors.capture_mutated(field, names[position], op)
    if drawn := random_op(graph):
        raise errors.mod_is_random(field, drawn)
    if beyond := number_beyond(graph):
        raise errors.number_beyond(field, *beyond)


def mark_checked(graph: fx.GraphModule) -> fx.GraphModule:
    """Say that `graph` needs no second look from `lane_graph`."""
    graph.meta[_CHECKED] = True
    return graph


def prepare(call: AttentionCall) -> AttentionCall:
    """Numbers become tensors, a scale that no kernel can hold as a literal a capture; captures are checked."""
    inputs = call.inputs
    call = call.with_inputs(
        score_captures=tuple(_number_to_tensor(c, call.query) for c in inputs.score_captures),
        mask_captures=tuple(_number_to_tensor(c, call.query) for c in inputs.mask_captures),
    )
    if inputs.tile_map is not None and inputs.schedule is None:
        raise errors.tile_map_without_schedule()
    if not _is_literal(call.scale, score_dtype(call.query.dtype)):
        call = _scale_as_capture(call)
    inputs = call.inputs
    tensors = (call.query, call.key, call.value, *inputs.differentiable)
    saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    for field in ("score", "mask"):
        mod, captures = getattr(call, f"{field}_mod"), getattr(inputs, f"{field}_captures")
        for i, capture in enumerate(captures):
            if capture.device != call.query.device:
                name = capture_names(mod, len(captures))[i]
                raise errors.capture_on_other_device(f"{field}_mod", name, capture.device, call.query.device)
            if saves and capture.is_inference():
                raise errors.capture_of_inference_mode(f"{field}_mod", capture_names(mod, len(captures))[i])
            if field == "mask" and capture.requires_grad:
                raise errors.mask_capture_needs_grad(capture_names(mod, len(captures))[i])
    if call.mask_mod is not None:
        mask = lane_graph(call.mask_mod, "mask_mod", call.query, inputs.mask_captures)
        call = call._replace(mask_mod=mask)
    return call


def with_score_graph(call: AttentionCall) -> AttentionCall:
    """`call` with its score_mod as a checked graph."""
    if call.score_mod is None:
        return call
    captures = call.inputs.score_captures
    return call._replace(score_mod=lane_graph(call.score_mod, "score_mod", call.query, captures))


def _number_to_tensor(capture: Any, query: Tensor) -> Any:
    """A Python number that Dynamo lifted, because it changes from call to call, becomes a 0-d tensor."""
    dtype = number_dtype(capture, query)
    if dtype is None:
        return capture
    number: Any = capture
    return torch.scalar_tensor(number, dtype=dtype, device=query.device)


def _is_literal(scale: Any, dtype: torch.dtype) -> bool:
    """Whether `scale` is the same in each call, and finite."""
    changes = isinstance(scale, (torch.SymInt, torch.SymFloat, Tensor))
    return not changes and abs(scale) <= torch.finfo(dtype).max


def _scale_as_capture(call: AttentionCall) -> AttentionCall:
    inner = call.score_mod
    scale: Any = call.scale
    if not isinstance(scale, Tensor):
        scale = torch.ones((), dtype=score_dtype(call.query.dtype), device=call.query.device) * scale

    def scaled(score, b, h, q_idx, kv_idx, scale, *captures):
        score = score * scale
        return score if inner is None else inner(score, b, h, q_idx, kv_idx, *captures)

    captures = call.inputs.score_captures
    names = ("scale", *capture_names(inner, len(captures)))
    call = call._replace(score_mod=WrappedMod(scaled, names), scale=1.0)
    return call.with_inputs(score_captures=(scale, *captures))
