"""Attention of nested (jagged) tensors: packed sequences, whose offsets the tensors bring along."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention import flex_attention as of_torch

from .. import errors as call_errors
from ..attention import serve
from ..checks import refused
from ..softmax import OF_ROWS, AuxOutput
from . import errors
from .attention import varlen_attention
from .mask import SequenceMask
from .sequences import Sequences

_JAGGED = 2  # the dimension of [batch, heads, length, head_dim] whose size differs from sequence to sequence


def nested_attention(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *rest: Any, **named: Any
) -> Any:
    """As flex_attention, each sequence by itself."""
    try:
        sides = [_side(name, t) for name, t in (("query", query), ("key", key), ("value", value))]
        _check_same(sides)
        if block_mask is not None and not isinstance(block_mask, SequenceMask):
            raise errors.not_a_mask_of_nested(block_mask)
        made = _sequences(*sides[:2])
        if block_mask is not None:
            _check_mask(block_mask.sequences, made)
    except call_errors.FlexError as error:
        refused(error)
    sequences = made if block_mask is None else block_mask.sequences
    packed = [tensor.values().transpose(0, 1) for tensor in (query, key, value)]
    given: list[Any] = [*packed, sequences, score_mod, block_mask, *rest]
    found = varlen_attention(*given, **named)
    if isinstance(found, Tensor):
        return _nested(found, query)
    out, beside = found
    if isinstance(beside, Tensor):
        return _nested(out, query), _nested(beside, query)
    of_rows = {name: _nested(getattr(beside, name), query) for name in OF_ROWS if hasattr(beside, name)}
    sums = getattr(beside, "column_sums", None)
    if sums is not None:
        of_rows["column_sums"] = _nested(sums.transpose(0, 1), key)
    # torch 2.11 returns nothing that _replace made.
    kind = AuxOutput if isinstance(beside, AuxOutput) else of_torch.AuxOutput
    return _nested(out, query), kind(**{**beside._asdict(), **of_rows})


def _nested(packed: Tensor | None, like: Any) -> Tensor | None:
    """[T, H, V], or [H, T], as [batch, heads, length, ...] with the lengths of `like`."""
    if packed is None:
        return None
    heads_first = packed.transpose(0, 1) if packed.dim() == 3 else packed
    return nested_tensor_from_jagged(heads_first, like.offsets(), like.lengths(), jagged_dim=_JAGGED)


class _Side:
    def __init__(self, name: str, tensor: Any):
        self.name, self.total = name, tensor.values().size(1)
        self.offsets, self.lengths = tensor.offsets(), tensor.lengths()

    def like(self, other: _Side) -> bool:
        return self.offsets is other.offsets and self.lengths is other.lengths and self.total == other.total


def _side(name: str, tensor: Any) -> _Side:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.jagged:
        raise errors.not_jagged(name, tensor)
    if tensor.dim() != 4 or getattr(tensor, "_ragged_idx") != _JAGGED:  # noqa: B009, as Tensor does not declare it
        raise errors.jagged_elsewhere(name)
    return _Side(name, tensor)


def _check_same(sides: list[_Side]) -> None:
    query, key, value = sides
    if not value.like(key):
        raise errors.other_offsets()
    if key.offsets.numel() != query.offsets.numel():
        raise errors.other_count("key", key.offsets.numel() - 1, query.offsets.numel() - 1, "query")


def _sequences(query: _Side, key: _Side) -> Sequences:
    """The sequences of the offsets, without reading these on the host."""
    cu_q, used_q = _int32(query)
    cu_k, used_k = (cu_q, used_q) if key.like(query) else _int32(key)
    totals = {"max_q": query.total, "max_k": key.total, "total_q": query.total, "total_k": key.total}
    return Sequences.unchecked(cu_q, cu_k, used_q=used_q, used_k=used_k, **totals)


def _int32(side: _Side) -> tuple[Tensor, Tensor | None]:
    used = None if side.lengths is None else side.lengths.to(torch.int32)
    return side.offsets.to(torch.int32), used


def _check_mask(masked: Sequences, made: Sequences) -> None:
    """Checks that the mask has the sequences of these tensors: else attention would silently cross their borders."""
    names = ("cu_q", "cu_k", "used_q", "used_k")
    for one, other in ((getattr(masked, name), getattr(made, name)) for name in names):
        if one is other:
            continue
        if one is None or other is None or one.shape != other.shape:
            raise errors.mask_of_others()
        if torch.compiler.is_dynamo_compiling():
            torch._assert_async((one == other).all(), errors.MASK_OF_OTHERS)
        elif not torch.equal(one, other):
            raise errors.mask_of_others()


serve("nested", nested_attention)
