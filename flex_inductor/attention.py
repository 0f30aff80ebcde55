"""flex_attention: check the call, then the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from . import compat, upward
from .checks import check_call, check_unplanned, is_distributed, refuse_untested, refused
from .masks.planned import PlannedMask
from .masks.schedule import RunSchedule, schedule_parts
from .op import AttentionCall, Inputs, attention, untraced
from .options import call_options
from .softmax import (
    AuxRequest,
    RngState,
    Scales,
    Softmax,
    answer,
    asked,
    dropout_mask,
    is_narrow,
)
from .softmax import errors as softmax_errors

upward.register_lowerings()

_served: dict[str, Callable[..., Any]] = {}


def serve(kind: str, by: Callable[..., Any]) -> None:
    """Have calls with other tensors served, "nested" or "dtensors", by what comes from modules that import this one."""
    _served[kind] = by


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | RunSchedule | PlannedMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0,  # not 0.0, of which Dynamo may make a symbol
    rng_state: RngState | None = None,
    head_offset: int = 0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Any:
    """Attend with scores changed by `score_mod` and pairs left out by `block_mask`.

    Signature and meaning are those of `torch.nn.attention.flex_attention.flex_attention`, with gradients, logsumexp and
    maximum on every device, and gradients of every tensor that score_mod captures. Compile the calling function with
    `torch.compile(..., backend="flex_inductor")` for a fused kernel; an eager call runs in chunks at first.

    Nested (jagged) tensors attend within each sequence and give nested results. Their `block_mask` is what
    `Sequences.from_nested(query, key).mask(mask_mod)` returns.

    DTensors with Shard(0), Shard(1) or Replicate() attend on each rank with its batches and heads, and give DTensors
    alike. Mods see global batches and heads.

    Args:
        query: [B, H, M, D] in float16, bfloat16, float32 or float64.
        key: [B or 1, H, N, D]; fewer heads, dividing H, with `enable_gqa`.
        value: [B or 1, H, N, V]; V may differ from D.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` on 0-d tensors returns the new score.
        block_mask: which blocks to visit and the mask_mod inside them, as torch's BlockMask or as a RunSchedule; see
            create_block_mask. With one that context_parallel has planned, the call is on the part of the sequence that
            this rank has.
        scale: multiplies the scores before score_mod; 1/sqrt(D) by default.
        enable_gqa: let groups of query heads share a head of keys and values.
        return_lse: return `(out, logsumexp)`.
        kernel_options: tuning hints, those of torch's FlexKernelOptions.
        return_aux: return `(out, AuxOutput)` with what the AuxRequest names, in natural logarithm.
        sinks: [H], learnable: one more score for each row of a head, which takes weight and has no value.
        dropout_p: the part of the weights that is left out, those that are kept grow by 1 / (1 - dropout_p). It is
            rounded to a multiple of 1 / 65536.
        rng_state: (seed, offset), two int64 tensors without dimensions, which say what is left out; by default drawn
            from torch's generator.
        head_offset: the number of query's first head where it has a part of all heads: dropout then leaves out what it
            does in a call with all of them.
        q_scale, k_scale, v_scale: what multiplies queries, keys and values of 8 bits (float8_e4m3fn or float8_e5m2,
            without gradients): [], or for each head [B, H]; of keys and values also for each row, [B, H, N]. The output
            has the query's dtype, but bfloat16 where that has 8 bits too.

    Returns:
        Tensor: [B, H, M, V]; with `return_lse` (out, logsumexp [B, H, M]); with `return_aux` (out, AuxOutput).

    Raises:
        FlexValueError: shapes, dtypes, devices or options do not fit.
        FlexTypeError: an argument has another type, or a mod takes other arguments or returns something else.
        FlexRuntimeError: a mod draws random numbers, or writes into what it captures.
        FlexNotImplementedError: something that is not served, such as a third derivative.

    Example:
        >>> query = torch.randn(1, 4, 64, 32)
        >>> bias = torch.zeros(64, requires_grad=True)
        >>> mask = create_block_mask(masks.causal(), None, None, 64, 64)
        >>> def score_mod(score, b, h, q_idx, kv_idx):
        ...     return score + bias[kv_idx]
        >>> out = flex_attention(query, query, query, score_mod, mask)
        >>> out.sum().backward()
        >>> out.shape, bias.grad.shape
        (torch.Size([1, 4, 64, 32]), torch.Size([64]))
    """
    if compat.failed_when_imported:  # asked here, as what Dynamo traces takes time
        refuse_untested()
    of_softmax, of_scales = (sinks, dropout_p, rng_state, head_offset), (q_scale, k_scale, v_scale)
    options = (enable_gqa, score_mod, scale, return_lse, kernel_options, return_aux)
    plain = untraced(_plain_call, query, key, value, block_mask, of_softmax, of_scales, *options)
    if plain is not None:
        out, lse, *_ = attention(*plain)
        return (out, lse) if return_lse else out
    return _with_more(query, key, value, block_mask, Softmax(*of_softmax), Scales(*of_scales), *options)


def _plain_call(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, of_softmax: Any, of_scales: Any, *options: Any
) -> AttentionCall | None:
    """The op's call, checked, of mods, a mask, a scale and hints alone. `options` are those of check_call."""
    softmax, scales = Softmax(*of_softmax), Scales(*of_scales)
    _, score_mod, scale, return_lse, kernel_options, return_aux = options
    more = any(given is not None for given in (return_aux, softmax.sinks, softmax.rng_state, *scales))
    others = _has_nested(query, key, value) or _has_distributed(query, key, value)
    elsewhere = isinstance(block_mask, PlannedMask) or others
    if more or elsewhere or softmax.dropout_p or softmax.head_offset or is_narrow(key):
        return None
    check_unplanned(query, key, value, block_mask, softmax, scales, *options)
    schedule, mask_mod = (None, None) if block_mask is None else schedule_parts(block_mask)
    of_op = (score_mod, mask_mod, scale, Inputs(schedule=schedule))
    return _call(query, key, value, *of_op, kernel_options, asked(None, return_lse))


def _with_more(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Any,
    softmax: Softmax,
    scales: Scales,
    *options: Any,
) -> Any:
    """Any other call. `options` are those of check_call."""
    enable_gqa, score_mod, scale, return_lse, kernel_options, return_aux = options
    if _has_nested(query, key, value):
        given = (scale, enable_gqa, return_lse, kernel_options)
        named = {"return_aux": return_aux, **softmax._asdict(), **scales._asdict()}
        return _served["nested"](query, key, value, score_mod, block_mask, *given, **named)
    if _has_distributed(query, key, value) and not isinstance(block_mask, PlannedMask):
        _import_dtensors()
        block_mask = _served["dtensors"](block_mask, query, key, value, softmax)
    wanted, softmax = asked(return_aux, return_lse), softmax.drawn(query)

    def call(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, inputs: Inputs) -> Any:
        mods = (score_mod, mask_mod)
        return attention(*_call(query, key, value, *mods, scale, inputs, kernel_options, wanted))

    if isinstance(block_mask, PlannedMask):
        for name in ("dropout_mask", "head_max_scores", "column_sums"):
            if getattr(wanted, name):
                refused(softmax_errors.request_of_a_part(name))
        if is_narrow(key) or any(scale is not None for scale in scales):
            refused(softmax_errors.narrow_part())

        def checks(query: Tensor, key: Tensor, value: Tensor) -> None:
            untraced(check_call, query, key, value, *options)

        results = block_mask.attend(query, key, value, score_mod, checks, call, wanted, softmax)
        kept = None
    else:
        untraced(check_unplanned, query, key, value, block_mask, softmax, scales, *options)
        schedule, mask_mod = schedule_parts(block_mask) if block_mask is not None else (None, None)
        query = scales.widened(query)
        more = softmax.inputs(query)
        if is_narrow(key):
            more |= scales.of_rows(key, lambda scale: scale if scale.dim() == 3 else scale.unsqueeze(-1))
        inputs = Inputs(schedule=schedule, **more)
        results = call(query, key, value, score_mod, mask_mod, inputs)
        kept = _dropout_mask(softmax, query, key) if wanted.dropout_mask else None
    return answer(return_aux, return_lse, results, softmax, kept)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    mask_mod: Any,
    scale: float | None,
    inputs: Inputs,
    kernel_options: dict[str, Any] | None,
    wanted: AuxRequest,
) -> AttentionCall:
    return AttentionCall(
        query,
        key,
        value,
        score_mod,
        None if mask_mod is noop_mask else mask_mod,
        1.0 / math.sqrt(query.size(-1) or 1) if scale is None else scale,
        inputs,
        call_options(kernel_options, lse=wanted.reads_lse, max_scores=wanted.maxima, more=wanted.more),
    )


def _has_nested(*tensors: Any) -> bool:
    return any(getattr(tensor, "is_nested", False) for tensor in tensors)


def _has_distributed(*tensors: Any) -> bool:
    return any(map(is_distributed, tensors))


@compat.run_while_traced
def _import_dtensors() -> None:
    upward.import_dtensors()


def _dropout_mask(softmax: Softmax, query: Tensor, key: Tensor) -> Tensor | None:
    b, h, m, n = (torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2)))
    return dropout_mask(softmax, (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), m.view(-1, 1), n), query)
