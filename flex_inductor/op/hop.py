"""The two higher-order ops.

`attention` takes both mods as callables (FX graphs once Dynamo has traced them) and the tensors they
capture as inputs. `attention_backward` also takes the joint graph, which `mod_ir.trace.trace_joint` makes.
What torch's dispatcher, tracers and transforms do with the ops is in `autograd`, `dispatch` and `flops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils._pytree import tree_map_only

from .. import compat, errors, supported, upward
from ..softmax import COLUMN_SUMS
from .call import AttentionCall, BackwardCall, has_few_queries, tensors_of
from .eager import known
from .prepare import lift_captures, prepare, with_score_graph
from .saved import save

_functorch: Any = torch._C._functorch  # its stubs are not complete


class _Op(HigherOrderOperator):
    def __call__(self, *args: Any) -> Any:
        """Run `called`. Proxies, with which a graph is read from a cache, go to torch."""
        return super().__call__(*args) if isinstance(args[0], fx.Proxy) else self.called(*args)

    # Where Dynamo gave up the whole function, it would compile frames inside, and traces of mods would run these.
    compat.compile_no_frame_of(__call__, calls=True)

    def called(self, *args: Any) -> Any:
        raise NotImplementedError

    def given(self, call: AttentionCall | BackwardCall) -> Any:
        """The op's results. torch's dispatcher takes longer than a small kernel, so it is asked only if it has a
        choice."""
        tensors = tensors_of(call)
        if not _only_autograd_sees(tensors):
            if any(map(_functorch.is_dead_tensor_wrapper, tensors)):  # of a transform that has ended
                return self.given(tree_map_only(Tensor, _functorch.unwrap_if_dead, call))
            if not _functorch.peek_interpreter_stack() and any(map(_functorch.is_batchedtensor, tensors)):
                raise errors.example_of_ended_vmap()
            if any(map(_functorch.is_legacy_batchedtensor, tensors)):
                raise errors.batched_gradients()
            return super().__call__(*call.wire())
        if _has_derivatives(tensors):
            return self.py_kernels[DispatchKey.Autograd](*call)
        return known.run(call, tensors, self.py_kernels[DispatchKey.CompositeExplicitAutograd])


def _only_autograd_sees(tensors: list[Tensor]) -> bool:
    """Whether tensors are plain ones, under no mode and no transform."""
    return not (
        torch._C._len_torch_function_stack()
        or _len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or _functorch.peek_interpreter_stack()
        or torch._C._is_any_autocast_enabled()
    ) and all(
        type(tensor) in _PLAIN and not torch._C._dispatch_keys(tensor).raw_repr() & ~_keys(tensor.device)
        for tensor in tensors
    )


def _has_derivatives(tensors: list[Tensor]) -> bool:
    """Whether autograd has something to do, backward or forward."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality):
        return False
    return forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


@functools.cache
def _keys(device: torch.device) -> int:
    """The dispatch keys of a plain tensor."""
    with torch.inference_mode(False):
        return torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()


class Attention(_Op):
    """(out, logsumexp, max_scores, and what options.more names); the second and third per row, in natural logarithm."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention", cacheable=True)

    def called(self, *args: Any) -> tuple[Tensor, ...]:
        if supported.UNTESTED and not _len_torch_dispatch_stack():
            upward.self_check("eager")
        call = lift_captures(AttentionCall.read(*args))
        if compat.is_exporting():
            return save(call)
        *more, last = call.options.more or (None,)
        if last != COLUMN_SUMS or _in_one_pass(call):
            return self.given(call)
        call = call._replace(options=call.options._replace(more=tuple(more)))
        out, lse, *rest = self.given(call)
        return out, lse, *rest, _column_sums(call, out, lse)


class AttentionBackward(_Op):
    """(d query, d key, d value, (d capture, ...)), None for what needs none."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_attention_backward", cacheable=True)

    def called(self, *args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple]:
        return self.given(BackwardCall.read(*args))


def _in_one_pass(call: AttentionCall) -> bool:
    """Whether one kernel gives the output and the sums of columns: that for few queries on a CPU."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes long to import

    if call.query.device.type != "cpu" or call.options.verify or _functorch.peek_interpreter_stack():
        return False

    def known(x: Any, y: Any) -> bool:
        return guard_or_false(x <= y)

    sizes, schedule = (call.query.size(2), call.query.size(1), call.key.size(1)), call.inputs.schedule
    return has_few_queries(*sizes, schedule and schedule.q_block, call.inputs.given(), known)


@torch.no_grad()
def _column_sums(call: AttentionCall, out: Tensor, lse: Tensor) -> Tensor:
    """[B or 1, K, N] in fp32: the sum of each key's weights.

    That is the gradient of values of one number each, where the gradient of every output is 1.
    """
    query, key = (tensor.detach().to(out.dtype) for tensor in (call.query, call.key))  # as autocast has it
    if call.inputs.kv_scales:
        key = (key * call.inputs.kv_scales[0].unsqueeze(-1)).to(out.dtype)
    value, of_rows = key.new_ones((*key.shape[:3], 1)), query.new_ones((*query.shape[:3], 1))
    alone = call._replace(query=query, key=key, value=value).with_inputs(
        stand_ins=(), sinks=None, dropout=None, in_blocks=False, kv_scales=(), partial=True
    )
    alone = with_score_graph(prepare(alone))
    grads: Any = attention_backward(
        query, key, value, of_rows, lse.detach(), of_rows, None,
        alone.score_mod, None, alone.mask_mod, alone.scale, ("value",), alone.inputs, alone.options,
    )  # fmt: skip
    return grads[2].squeeze(-1)


class Untraced(HigherOrderOperator):
    """`function(*args)`, which looks at its arguments and computes with no tensor.

    Dynamo calls it on what it knows of the arguments, as tracing it would take a hundred times as long. It returns
    arguments, attributes of them, constants, and tuples of these. If it refuses the call where Dynamo may not break
    the graph, the user gets this error and not Dynamo's of it.
    """

    def __init__(self) -> None:
        super().__init__("flex_inductor_untraced")

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    compat.compile_no_frame_of(__call__, calls=True)  # after a graph break


attention = Attention()
attention_backward = AttentionBackward()
untraced = Untraced()
