"""The classes of errors, and the messages about attention's own arguments; most folders have messages of their own.

Each names the argument, what came, what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class FlexError(Exception):
    r"""Base of all errors raised by flex_inductor.

    A message names the argument, what came, what was expected and what to do.

    Example:
        >>> query, key = torch.zeros(1, 8, 16, 32), torch.zeros(1, 2, 16, 32)
        >>> try:
        ...     flex_attention(query, key, key)
        ... except flex_inductor.FlexError as error:
        ...     print(*str(error).split(". "), sep="\n")
        query has 8 heads and key has 2; without enable_gqa they must be equal
        For grouped-query attention pass enable_gqa=True.
    """


class FlexValueError(FlexError, ValueError):
    """An argument has the right type and a value that cannot be served. It is a ValueError too.

    Example:
        >>> try:
        ...     mods.softcap(-1.0)
        ... except ValueError as error:
        ...     print(error)
        softcap: cap: expected a positive number, got -1.0.
    """


class FlexTypeError(FlexError, TypeError):
    r"""An argument has the wrong type, or a function the wrong signature or result. It is a TypeError too.

    Example:
        >>> query = torch.zeros(1, 1, 4, 8)
        >>> try:
        ...     flex_attention(query, query, query, masks.causal())
        ... except TypeError as error:
        ...     print(*str(error).replace(", but", ". But").split(". "), sep="\n")
        score_mod must take 5 arguments, score_mod(score, b, h, q_idx, kv_idx)
        But `causal.<locals>.causal` takes 4
        It looks like a mask_mod: were the two swapped?
    """


class FlexNotImplementedError(FlexError, NotImplementedError):
    """Something that flex_inductor does not do. It is a NotImplementedError too.

    Example:
        >>> query = torch.ones(1, 1, 4, 8, requires_grad=True)
        >>> def derivative(result):
        ...     return torch.autograd.grad(result.sin().sum(), query, create_graph=True)[0]
        >>> second = derivative(derivative(flex_attention(query, query, query)))
        >>> try:
        ...     derivative(second)
        ... except NotImplementedError as error:
        ...     print(str(error).partition(":")[0])
        flex_attention has no third derivative
    """


class FlexRuntimeError(FlexError, RuntimeError):
    """Something that only running could show. It is a RuntimeError too.

    Example:
        >>> query = torch.zeros(1, 1, 4, 8)
        >>> try:
        ...     flex_attention(query, query, query, lambda score, *_: score + torch.rand(()))
        ... except RuntimeError as error:
        ...     print(str(error).partition(" (")[0])
        score_mod draws random numbers
    """


class TooManyKernels(FlexRuntimeError):
    """A class of eager calls has kernels enough, and none for this call.

    Example:
        >>> issubclass(flex_inductor.errors.TooManyKernels, RuntimeError)
        True
    """


def cannot_compile(reason: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"A graph with attention cannot be compiled here: {reason}. `flex-inductor env` shows what there is."
    )


def own_error_in(error: BaseException | None) -> FlexError | None:
    """The FlexError among the causes of `error`, or None."""
    while error is not None and not isinstance(error, FlexError):
        error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
    return error


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(str(size) for size in tensor.shape)}]"


# Query, key and value.


def not_a_tensor(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(f"{name} must be a torch.Tensor, but is {described(value)}.")


def nested_tensor(name: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected a tensor of packed tokens, got a nested one. Pass its .values(), or query, key and value as "
        "nested tensors to flex_attention."
    )


def distributed_tensor(name: str) -> FlexValueError:
    return FlexValueError(
        f"{name}: expected a tensor of this rank, got a DTensor. Pass its .to_local(), where mods see this rank's "
        "batches and heads, or query, key and value as DTensors to flex_attention."
    )


def wrong_rank(name: str, tensor: Tensor) -> FlexValueError:
    return FlexValueError(
        f"{name} must have 4 dimensions, [batch, heads, length, head_dim], but has {tensor.dim()}: "
        f"{_shape(tensor)}. Add the missing dimensions with unsqueeze."
    )


def unsupported_dtype(name: str, dtype: torch.dtype) -> FlexValueError:
    return FlexValueError(
        f"{name} has dtype {dtype}; expected torch.float16, bfloat16, float32 or float64. "
        f"Convert it, for example with {name}.to(torch.bfloat16)."
    )


def not_strided(name: str, layout: torch.layout) -> FlexValueError:
    return FlexValueError(
        f"{name} has layout {layout}; expected torch.strided. Convert it with {name}.to_dense()."
    )


def mixed(what: str, query: Any, key: Any, value: Any) -> FlexValueError:
    return FlexValueError(
        f"query, key and value must have the same {what}, but query has {query}, key {key} and value {value}. "
        f"Convert them with .to()."
    )


def narrow_differ(key: torch.dtype, value: torch.dtype) -> FlexValueError:
    return FlexValueError(
        f"key and value must have the same 8-bit type, but key has {key} and value {value}. Convert one with .to()."
    )


def narrow_with_float64(key: torch.dtype) -> FlexValueError:
    return FlexValueError(
        f"query has dtype torch.float64, which is not served with keys and values of {key}. Convert the query to "
        "float32, or key and value to float64."
    )


def traced_by_jit() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record attention with its mods. Use "
        "torch.export.export, or torch.onnx.export(dynamo=True)."
    )


def meta_tensors() -> FlexValueError:
    return FlexValueError(
        "query, key and value are on the meta device, which holds no values. Make them on the device that is to "
        "compute, for example with model.to_empty(device='cpu'); for shapes alone use FakeTensorMode and a real device."
    )


def head_dims_differ(query: Tensor, key: Tensor) -> FlexValueError:
    return FlexValueError(
        f"query and key must have the same head_dim (last dimension), but query has {query.size(-1)} and key "
        f"{key.size(-1)}. Only value's may differ."
    )


def key_value_differ(key: Tensor, value: Tensor) -> FlexValueError:
    return FlexValueError(
        f"key and value must agree in batch, heads and length, but key is {_shape(key)} and value {_shape(value)}."
    )


def batch_mismatch(query: Tensor, key: Tensor) -> FlexValueError:
    return FlexValueError(
        f"key and value must have query's batch size, {query.size(0)}, or 1, but have {key.size(0)}."
    )


def gqa_not_enabled(query_heads: int, kv_heads: int) -> FlexValueError:
    return FlexValueError(
        f"query has {query_heads} heads and key has {kv_heads}; without enable_gqa they must be equal. "
        f"For grouped-query attention pass enable_gqa=True."
    )


def heads_do_not_divide(query_heads: int, kv_heads: int) -> FlexValueError:
    return FlexValueError(
        f"With enable_gqa, query's heads must be a multiple of key's, but query has {query_heads} and key {kv_heads}."
    )


def not_a_bool(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name} must be True or False, but is {described(value)}. Call bool() on a result of numpy or torch."
    )


def bad_scale(scale: Any) -> FlexTypeError:
    return FlexTypeError(
        f"scale must be a Python number or None (for 1/sqrt(head_dim)), but is {described(scale)}. "
        f"A tensor scale that needs a gradient belongs in score_mod: lambda score, *_: score * scale."
    )


def scale_beyond(dtype: torch.dtype) -> FlexValueError:
    name = str(dtype).removeprefix("torch.")
    return FlexValueError(
        f"scale is beyond what {name}, the dtype of the scores, holds ({torch.finfo(dtype).max:.3g}). Give a smaller "
        f"one, or query, key and value in float64."
    )


def lse_and_aux() -> FlexValueError:
    return FlexValueError(
        "return_lse and return_aux were both given. Use return_aux=AuxRequest(lse=True) alone."
    )


def bad_aux(value: Any) -> FlexTypeError:
    return FlexTypeError(f"return_aux must be an AuxRequest or None, but is {described(value)}.")


# Score_mod and mask_mod: more is in mod_ir/errors.py.

SIGNATURES = {
    "score_mod": "score_mod(score, b, h, q_idx, kv_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, kv_idx)",
}


def not_callable(name: str, value: Any) -> FlexTypeError:
    or_none, hint = "", ""
    if name == "score_mod":
        or_none = ", or None"
        hint = " Pass the BlockMask as block_mask=." if isinstance(value, _block_mask_type()) else ""
    return FlexTypeError(
        f"{name} must be a function, {SIGNATURES[name]}{or_none}, but is {described(value)}.{hint}"
    )


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)} and dtype {value.dtype}"
    return kind_of(value)


def kind_of(value: Any) -> str:
    """The type's name with its article."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


# Block_mask.


def _block_mask_type() -> type:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask


def not_a_block_mask(value: Any) -> FlexTypeError:
    hint = " Wrap the function: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)." if callable(value) else ""
    return FlexTypeError(
        f"block_mask must be a BlockMask, a RunSchedule or None, but is {kind_of(value)}.{hint}"
    )


def block_mask_lengths(mask_q: int, mask_kv: int, q_len: int, kv_len: int) -> FlexValueError:
    return FlexValueError(
        f"block_mask was made for Q_LEN={mask_q} and KV_LEN={mask_kv}, but query has length {q_len} and key "
        f"{kv_len}. Make it with create_block_mask(mask_mod, B, H, {q_len}, {kv_len})."
    )


def block_mask_batch(name: str, mask_size: int, size: int) -> FlexValueError:
    allowed = "1" if size == 1 else f"{size} or 1"
    return FlexValueError(
        f"block_mask has {name}={mask_size}, but query has {name}={size}. It must be {allowed}: make it with "
        f"create_block_mask(..., {name}={size}) or {name}=None."
    )


def block_mask_device(device: Any, expected: Any) -> FlexValueError:
    return FlexValueError(
        f"block_mask is on {device}, but query is on {expected}. Move it with block_mask.to('{expected}')."
    )


def sliced_block_mask() -> FlexRuntimeError:
    return FlexRuntimeError(
        "block_mask was sliced, which drops its mask_mod, because row i of the slice is no longer q_idx i. "
        "Set block_mask.mask_mod to a function with the offset added to q_idx, and before torch 2.14 also "
        "block_mask.seq_lengths to (queries, keys) of the slice."
    )


# Options.


def no_options(value: Any) -> FlexTypeError:
    return FlexTypeError(f"kernel_options must be a dict of hints, or None, but is {described(value)}.")


def unknown_option(where: str, name: Any, known: Iterable[str]) -> FlexValueError:
    return FlexValueError(f"{where} has no option {name!r}. Known: {', '.join(sorted(known))}.")


def bad_option(where: str, name: str, value: Any, expected: str) -> FlexValueError:
    return FlexValueError(f"{where}[{name!r}] is {value!r}; expected {expected}.")


def bad_argument(name: str, expected: str, got: Any) -> FlexValueError:
    return FlexValueError(f"{name}: expected {expected}, got {got}.")


def kernel_differs(
    name: str,
    tile: Sequence[tuple[int, int]],
    place: Sequence[int],
    got: float,
    want: float,
    allowed: float,
    code: str,
    sequence: int | None = None,
) -> FlexRuntimeError:
    axes = ("batch", "head", "queries" if name in ("out", "lse", "max_scores", "d_q") else "keys")
    if sequence is not None:  # the others are counted within it
        axes = ("sequence", *axes[1:])
        tile, place = [(sequence, sequence + 1), *tile[1:]], [sequence, *place[1:]]
    if name.startswith("d_captures"):
        where = "the captured tensor"
    else:
        where = ", ".join(
            f"{axis} {start}" if axis in axes[:2] else f"{axis} {start} to {stop - 1}"
            for axis, (start, stop) in zip(axes, tile, strict=False)
        )
    lines = "".join(f"\n  {line}" for line in code.splitlines()) or " nothing"
    return FlexRuntimeError(
        f"verify: {name} is wrong in {where}. At {[*place]} the kernel gives {got:.6g} and float64 gives "
        f"{want:.6g}, where rounding allows for {allowed:.3g}. It is a fault of flex_inductor: options={{'route': "
        f"'chunked'}} avoids the kernel. Inlined:{lines}"
    )


def captures_not_verified(shapes: Sequence[Sequence[int]], lanes: int, limit: int) -> str:
    """A warning's text."""
    return (
        f"verify: gradients of captured tensors of shapes {', '.join(map(str, shapes))} are not checked: the call has "
        f"{lanes:,} scores, and no element was found that at most {limit:,} of them add to. Check a shorter call."
    )


def blocks_not_for_all(names: Sequence[str], place: Sequence[int]) -> FlexValueError:
    """`place` is b, h, q_idx and kv_idx of a lane."""
    sizes = " and ".join(f"{name}=1" for name in names)
    b, h, q, kv = place
    return FlexValueError(
        f"verify: block_mask has {sizes}, and its mask_mod differs between those that share its blocks: at b={b}, "
        f"h={h}, q_idx={q}, kv_idx={kv} it does not say what the blocks do. Pass the sizes of the call to "
        f"create_block_mask as {' and '.join(names)}."
    )


def inputs_not_served(names: Sequence[str], served: Iterable[str]) -> FlexNotImplementedError:
    given = " and ".join(f"inputs.{name}" for name in names)
    return FlexNotImplementedError(
        f"{given} cannot be used by the code that computes this call; expected no inputs but {', '.join(served)}. "
        f"Leave {given} out."
    )


def bad_tile_map(name: str, tensor: Tensor, expected: tuple[int, int]) -> FlexValueError:
    return FlexValueError(
        f"tile_map.{name} is {tensor.dtype} of shape {_shape(tensor)}; expected torch.int32 of shape {list(expected)}, "
        f"a line for each {'row' if name == 'queries' else 'column'} of the schedule."
    )


def tile_map_without_schedule() -> FlexValueError:
    return FlexValueError(
        "tile_map is given without a schedule; expected one whose rows and columns are the map's tiles. Pass both."
    )


def tile_map_without_runs(form: str) -> FlexValueError:
    return FlexValueError(
        f"tile_map is given with a schedule of {form}; expected BlockRuns of runs for rows and columns, or Bounds "
        "with a sequence_table. Pass one of these, or leave tile_map out."
    )


# Derivatives.


def third_derivative() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "flex_attention has no third derivative: a derivative of a second derivative was asked for. Detach the second "
        "derivative before using it, or write the attention in plain torch operations. For products with the Hessian, "
        "take torch.autograd.functional.vhp or torch.func.jvp of torch.func.grad in place of functional.hvp."
    )


def forward_over_forward() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "flex_attention has no forward-mode derivative of a forward-mode derivative (jvp of jvp, jacfwd of jacfwd). "
        "Use reverse mode inside or outside: jvp of grad, jacfwd of jacrev, or grad of jvp."
    )


def batched_gradients() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention has no batched gradients outside of torch.func (is_grads_batched=True, or vectorize=True of "
        "torch.autograd.functional). Use torch.func.jacrev, jacfwd, hessian, or vmap of what torch.func.vjp returns."
    )


def tangent_in_graph() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention inside of torch.autograd.forward_ad.dual_level is not served in a compiled function, which would "
        "lose its tangent. Use torch.func.jvp there, or call the function without compiling."
    )


def derivative_of_narrow() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention to keys and values of 8 bits has no derivatives (torch.func.jvp, grad). Convert them to the query's "
        "dtype."
    )


def derivative_of_shards() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention over the shards of several ranks has neither forward-mode nor second derivatives (torch.func.jvp, "
        "create_graph=True, grad of grad). Run it in one process, or take the gradient without create_graph."
    )


def derivative_of_trace() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "the backward of attention in a traced graph has lost its score_mod, so it has no derivative. Trace the second "
        "derivative too: make the graph of the function that computes it."
    )


def sequences_in_vmap() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention on packed sequences (varlen_attention, nested tensors) is not served inside of torch.func.vmap, "
        "which jacrev uses too. Pack the examples as further sequences of one call, or call it once for each."
    )


def planned_in_vmap() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "attention with a mask that context_parallel has planned is not served inside of torch.func.vmap, which jacrev "
        "uses too. Make the examples further batches of one call, or call it once for each."
    )


def example_of_ended_vmap() -> FlexRuntimeError:
    return FlexRuntimeError(
        "a tensor of the call, or one that its mask or a mod captures, was made inside of a torch.func.vmap that has "
        "ended. Return it from the vmapped function, and use what vmap returns."
    )


# Context parallelism.


def unplanned(what: str) -> FlexValueError:
    return FlexValueError(
        f"{what}: called inside of `with context_parallel(...)` without a planned mask, it would attend to this rank's "
        "tokens alone. Pass block_mask=cp.plan(mask), or call it outside."
    )
