"""What a call of flex_attention is refused for before it runs."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from . import compat, errors
from .masks.planned import needs_plan
from .masks.schedule import RunSchedule
from .op import untraced
from .options import check_kernel_options
from .softmax import NARROW, REQUESTS, Scales, Softmax, is_narrow

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def refuse_untested() -> None:
    """Refuse what Dynamo traces if it could not be told of the ops."""
    if torch.compiler.is_dynamo_compiling() and compat.failed_when_imported:
        _refuse_untested()


@compat.run_while_traced
def _refuse_untested() -> None:
    raise compat.through_dynamo(errors.FlexRuntimeError(compat.failed_when_imported[0]))


def refused(error: errors.FlexError) -> NoReturn:
    """Raise `error` without Dynamo's words around it, also while Dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        untraced(_raise, type(error), *error.args)
    raise error


def _raise(kind: type[errors.FlexError], *args: Any) -> NoReturn:
    raise kind(*args)


def check_call(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, score_mod: Any, *options: Any
) -> None:
    """Refuse what no call takes. `options` are those of check_options."""
    check_tensors(query, key, value, enable_gqa, narrow=True)
    check_options(query, score_mod, *options)


def check_unplanned(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, softmax: Softmax, scales: Scales, *options: Any
) -> None:
    """Refuse what no call takes whose mask is not planned. `options` are those of check_call."""
    check_call(query, key, value, *options)
    scales.check(query, key, tuple(key.shape[:2]), tuple(key.shape[:3]))
    softmax.check(query)
    if needs_plan():
        raise errors.unplanned("flex_attention")
    if mask is not None:
        check_block_mask(mask, query, key)


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor, whose module takes long to import."""
    return hasattr(tensor, "placements")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, narrow: bool = False) -> None:
    """Refuse tensors that are no query, key and value; `narrow`: of 8 bits are served too."""
    if torch.jit.is_tracing():
        raise errors.traced_by_jit()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise errors.not_a_tensor(name, tensor)
        if tensor.is_nested:
            raise errors.nested_tensor(name)
        if is_distributed(tensor):
            raise errors.distributed_tensor(name)
        if tensor.layout != torch.strided:
            raise errors.not_strided(name, tensor.layout)
        if tensor.dim() != 4:
            raise errors.wrong_rank(name, tensor)
        if tensor.dtype not in (_DTYPES + NARROW if narrow else _DTYPES):
            raise errors.unsupported_dtype(name, tensor.dtype)
    if query.device != key.device or query.device != value.device:
        raise errors.mixed("device", query.device, key.device, value.device)
    if query.device.type == "meta":
        raise errors.meta_tensors()
    if is_narrow(key):
        if key.dtype != value.dtype:
            raise errors.narrow_differ(key.dtype, value.dtype)
        if query.dtype == torch.float64:
            raise errors.narrow_with_float64(key.dtype)
    elif query.dtype != key.dtype or query.dtype != value.dtype:
        wide = torch.float64 in (query.dtype, key.dtype, value.dtype)  # autocast leaves it as it is
        if wide or not torch.is_autocast_enabled(query.device.type):
            raise errors.mixed("dtype", query.dtype, key.dtype, value.dtype)
    if query.size(-1) != key.size(-1):
        raise errors.head_dims_differ(query, key)
    if key.size(0) != value.size(0) or key.size(1) != value.size(1) or key.size(2) != value.size(2):
        raise errors.key_value_differ(key, value)
    if key.size(0) != query.size(0) and key.size(0) != 1:
        raise errors.batch_mismatch(query, key)
    _check_bool("enable_gqa", enable_gqa)
    if query.size(1) != key.size(1):
        if not enable_gqa:
            raise errors.gqa_not_enabled(query.size(1), key.size(1))
        if key.size(1) == 0 or query.size(1) % key.size(1) != 0:
            raise errors.heads_do_not_divide(query.size(1), key.size(1))


def check_options(
    query: Tensor, score_mod: Any, scale: Any, return_lse: bool, kernel_options: Any, return_aux: Any
) -> None:
    if scale is not None and not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise errors.bad_scale(scale)
    _check_bool("return_lse", return_lse)
    if return_lse and return_aux is not None:
        raise errors.lse_and_aux()
    if return_aux is not None and not isinstance(return_aux, REQUESTS):
        raise errors.bad_aux(return_aux)
    if score_mod is not None and not callable(score_mod):
        raise errors.not_callable("score_mod", score_mod)
    check_kernel_options(kernel_options)
    _check_scale(scale, query)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise errors.not_a_bool(name, value)


def _check_scale(scale: Any, query: Tensor) -> None:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32  # of the scores
    if scale is not None and torch.finfo(dtype).max < abs(scale) < math.inf:
        raise errors.scale_beyond(dtype)


def check_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Refuse what is no mask, or none for these tensors."""
    if not isinstance(block_mask, (BlockMask, RunSchedule)):
        raise errors.not_a_block_mask(block_mask)
    if compat.is_sliced(block_mask):
        raise errors.sliced_block_mask()
    device = block_mask.device if isinstance(block_mask, RunSchedule) else block_mask.kv_num_blocks.device
    mask_b, mask_h, mask_q, mask_kv = block_mask.shape
    if mask_q != query.size(2) or mask_kv != key.size(2):
        raise errors.block_mask_lengths(mask_q, mask_kv, query.size(2), key.size(2))
    if mask_b not in (1, query.size(0)):
        raise errors.block_mask_batch("B", mask_b, query.size(0))
    if mask_h not in (1, query.size(1)):
        raise errors.block_mask_batch("H", mask_h, query.size(1))
    if device != query.device:
        raise errors.block_mask_device(device, query.device)
