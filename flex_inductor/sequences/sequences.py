"""Where sequences lie in packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import errors
from .mask import SequenceMask, sequence_mask
from .padding import check_padding_mask


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequence n has the queries cu_q[n] to cu_q[n + 1] and the keys cu_k[n] to cu_k[n + 1] of the packed tokens.

    Positions are local, and the last query stands at the last key: with 2 queries and 10 keys, the queries are at 8
    and 9. So `q_idx >= kv_idx` is causal for prefill, for a chunk of a prompt and for a step of decoding.

    Values are checked here, once. Later ones may be copied into the tensors, as in a CUDA graph; nobody reads them on
    the host then, and they must keep within what is said below of `total_q`.

    Args:
        cu_q: int32 [sequences + 1], from 0, never falling.
        cu_k: the same of keys; cu_q by default.
        used_q: int32 [sequences], how many of a sequence's queries there are; all by default.
        used_k: the same of its keys. `used_k` of 0 gives rows of zeros.
        max_q: at least the most queries that a sequence ever has; that of cu_q by default.
        max_k: the same of keys.
    """

    cu_q: Tensor
    cu_k: Tensor | None = None
    used_q: Tensor | None = field(default=None, kw_only=True)
    used_k: Tensor | None = field(default=None, kw_only=True)
    max_q: int | None = field(default=None, kw_only=True)
    max_k: int | None = field(default=None, kw_only=True)
    total_q: int = field(init=False)  # the most tokens that cu_q may ever end at
    total_k: int = field(init=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # what a frozen dataclass leaves for this purpose
        if self.cu_k is None:
            set_field(self, "cu_k", self.cu_q)
        for side in ("q", "k"):
            starts = _offsets(f"cu_{side}", getattr(self, f"cu_{side}"), self.cu_q)
            used = getattr(self, f"used_{side}")
            lengths = starts.diff() if used is None else _used(f"used_{side}", used, starts, self.cu_q)
            longest = int(lengths.max()) if lengths.numel() else 0
            given = getattr(self, f"max_{side}")
            if given is not None and given < longest:
                raise errors.max_below(f"max_{side}", given, longest)
            set_field(self, f"max_{side}", longest if given is None else given)
            set_field(self, f"total_{side}", int(starts[-1]))

    @property
    def count(self) -> int:
        return self.cu_q.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.cu_q.device

    @property
    def lengths_q(self) -> Tensor:
        return self.cu_q.diff() if self.used_q is None else self.used_q

    @property
    def lengths_k(self) -> Tensor:
        assert self.cu_k is not None
        return self.cu_k.diff() if self.used_k is None else self.used_k

    @classmethod
    def from_lengths(
        cls,
        lengths_q: Sequence[int] | Tensor,
        lengths_k: Sequence[int] | Tensor | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Sequences:
        """Sequences of these lengths, one after the other."""
        return cls(_summed(lengths_q, device), None if lengths_k is None else _summed(lengths_k, device))

    @classmethod
    def from_padding_mask(cls, mask: Tensor) -> Sequences:
        """What `unpad` packs: the tokens of each row of `mask` [batch, length] at which it is True."""
        check_padding_mask(mask)
        return cls.from_lengths(mask.sum(1), device=mask.device)

    @classmethod
    def from_nested(cls, query: Any, key: Any = None) -> Sequences:
        """Those of jagged nested tensors [sequences, jagged, ...]."""
        for name, tensor in (("query", query), ("key", key)):
            if tensor is not None and getattr(tensor, "layout", None) != torch.jagged:
                raise errors.not_jagged(name, tensor)
        offsets = [None if t is None else t.offsets().to(torch.int32) for t in (query, key)]
        lengths = [
            None if t is None or t.lengths() is None else t.lengths().to(torch.int32) for t in (query, key)
        ]
        return cls(*offsets, used_q=lengths[0], used_k=lengths[1] if key is not None else lengths[0])

    def mask(
        self,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
        *,
        heads: int | None = None,
        block_size: int | tuple[int, int] | None = None,
    ) -> SequenceMask:
        """What attention visits within each sequence: make it once a step, for all layers.

        `mask_mod(sequence, h, q_idx, kv_idx)` sees local positions. No mask, causal ones and windows cost a few
        operations and read nothing on the host; others are analysed. A mask that reads h needs `heads`.
        """
        return sequence_mask(self, mask_mod, heads, block_size)


def _summed(lengths: Sequence[int] | Tensor, device: Any) -> Tensor:
    found = torch.as_tensor(lengths, device=device)
    return torch.nn.functional.pad(found.cumsum(0), (1, 0)).to(torch.int32)


def _offsets(name: str, offsets: Any, cu_q: Tensor) -> Tensor:
    """The offsets on the host, checked."""
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise errors.not_offsets(name, offsets)
    if offsets.device != cu_q.device:
        raise errors.other_device(name, offsets.device, cu_q.device)
    if offsets.numel() == 0:
        raise errors.no_first_offset(name)
    if offsets.numel() != cu_q.numel():
        raise errors.other_count(name, offsets.numel() - 1, cu_q.numel() - 1)
    found = offsets.cpu()
    if found[0] != 0 or (found.diff() < 0).any():
        raise errors.bad_offsets(name, found.tolist())
    return found


def _used(name: str, used: Any, starts: Tensor, cu_q: Tensor) -> Tensor:
    count = starts.numel() - 1
    if not isinstance(used, Tensor) or used.dtype != torch.int32 or used.shape != (count,):
        raise errors.not_lengths(name, used, count)
    if used.device != cu_q.device:
        raise errors.other_device(name, used.device, cu_q.device)
    found, room = used.cpu(), starts.diff()
    beyond = ((found < 0) | (found > room)).nonzero()
    if len(beyond):
        at = int(beyond[0])
        raise errors.used_beyond_room(name, at, int(found[at]), int(room[at]))
    return found


_TENSORS = ("cu_q", "cu_k", "used_q", "used_k")
_NUMBERS = ("max_q", "max_k", "total_q", "total_k")


def _flatten(sequences: Sequences) -> tuple[list[Any], tuple[int, ...]]:
    return [getattr(sequences, n) for n in _TENSORS], tuple(getattr(sequences, n) for n in _NUMBERS)


def _unflatten(tensors: Any, numbers: tuple[int, ...]) -> Sequences:
    """Without a look at the values: they were checked, or are not there."""
    made = object.__new__(Sequences)
    for name, value in (*zip(_TENSORS, tensors, strict=True), *zip(_NUMBERS, numbers, strict=True)):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(Sequences, _flatten, _unflatten, serialized_type_name="flex_inductor.Sequences")
