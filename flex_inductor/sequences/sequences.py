"""Where sequences lie in packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..masks import pytrees
from . import errors
from .mask import SequenceMask, sequence_mask
from .padding import check_padding_mask
from .places import Cached, Packed, Paged, Places


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where sequences lie: their queries in packed tokens, their keys packed too or in a cache.

    Sequence n has the queries cu_q[n] to cu_q[n + 1].

    Positions are local, and the last query stands at the last key: with 2 queries and 10 keys, the queries are at 8 and
    9. So `q_idx >= kv_idx` is causal for prefill, for a chunk of a prompt and for a step of decoding.

    Values are checked here, once. You may copy others into the tensors later, as for a CUDA graph. They are not read on
    the host then: `max_q`, `max_k` and the ends of the offsets are upper bounds.

    Args:
        cu_q: int32 [sequences + 1], from 0, never falling.
        cu_k: the same of packed keys; cu_q by default, unless `used_k` is given alone: then keys are in a cache.
        used_q: int32 [sequences], how many of a sequence's queries there are; all by default.
        used_k: the same of its keys.
        left_pad_k: int32 [sequences], with how many tokens of padding a row of the cache begins; `used_k` counts them.
        cache_rows: int32 [sequences], the row of the cache; n for sequence n by default.
        pages: int32 [sequences, most pages], the pages of each in a pool of pages of `page_size` tokens.
        page_size: how many tokens a page has.
        max_q: at least the most queries that a sequence ever has; that of now by default.
        max_k: the same of keys.

    Raises:
        SequencesError: values do not fit together; the message names the sequence.
        FlexTypeError: an argument has another type or dtype.

    Example:
        >>> int32 = torch.int32
        >>> packed = Sequences(torch.tensor([0, 3, 53, 60], dtype=int32))
        >>> packed.count, packed.max_q, packed.total_q
        (3, 50, 60)
        >>> pages = torch.tensor([[4, 0], [2, -1]], dtype=int32)  # of a pool of five
        >>> paged = Sequences(
        ...     torch.tensor([0, 1, 2], dtype=int32), used_k=torch.tensor([20, 5], dtype=int32),
        ...     pages=pages, page_size=16)
        >>> query, pool = torch.randn(2, 4, 8), torch.randn(5, 16, 4, 8)
        >>> varlen_attention(query, pool, pool, paged).shape
        torch.Size([2, 4, 8])
    """

    cu_q: Tensor
    cu_k: Tensor | None = None
    used_q: Tensor | None = field(default=None, kw_only=True)
    used_k: Tensor | None = field(default=None, kw_only=True)
    left_pad_k: Tensor | None = field(default=None, kw_only=True)
    cache_rows: Tensor | None = field(default=None, kw_only=True)
    pages: Tensor | None = field(default=None, kw_only=True)
    page_size: int | None = field(default=None, kw_only=True)
    max_q: Any = field(default=None, kw_only=True)
    max_k: Any = field(default=None, kw_only=True)
    total_q: int = field(init=False)  # the most tokens that cu_q may ever end at
    total_k: int = field(init=False)  # 0 for keys in a cache

    def __post_init__(self) -> None:
        starts = _offsets("cu_q", self.cu_q, self.cu_q)
        self._set(
            "q", starts.diff() if self.used_q is None else self._used("q", starts.diff()), int(starts[-1])
        )
        if self.used_k is None or self.cu_k is not None:
            for name in ("left_pad_k", "cache_rows", "pages", "page_size"):
                if getattr(self, name) is not None:
                    raise errors.without_room(name)
            if self.cu_k is None:
                object.__setattr__(self, "cu_k", self.cu_q)
            starts = _offsets("cu_k", self.cu_k, self.cu_q)
            self._set(
                "k", starts.diff() if self.used_k is None else self._used("k", starts.diff()), int(starts[-1])
            )
        else:
            self._set("k", self._in_cache(), 0)

    def _set(self, side: str, lengths: Tensor, total: int) -> None:
        longest, given = int(lengths.max()) if lengths.numel() else 0, getattr(self, f"max_{side}")
        if given is not None and (not isinstance(given, int | torch.SymInt) or isinstance(given, bool)):
            raise errors.bad_max(f"max_{side}", given)
        if given is not None and given < longest:
            raise errors.max_below(f"max_{side}", given, longest)
        object.__setattr__(self, f"max_{side}", longest if given is None else given)
        object.__setattr__(self, f"total_{side}", total)

    def _used(self, side: str, room: Tensor | None) -> Tensor:
        name = f"used_{side}"
        found = _by_sequence(name, getattr(self, name), self.cu_q)
        for at in (
            ((found < 0) if room is None else (found < 0) | (found > room)).nonzero().flatten().tolist()
        ):
            raise errors.used_beyond_room(name, at, int(found[at]), None if room is None else int(room[at]))
        return found

    def _in_cache(self) -> Tensor:
        """How many tokens of each sequence's row or pages are used."""
        if (self.pages is None) != (self.page_size is None) or (
            self.page_size is not None and not _is_positive(self.page_size)
        ):
            raise errors.pages_without_size()
        if self.pages is None:
            used = self._used("k", None)
            if self.left_pad_k is not None:
                pads = _by_sequence("left_pad_k", self.left_pad_k, self.cu_q)
                for at in ((pads < 0) | (pads > used)).nonzero().flatten().tolist():
                    raise errors.left_pad_beyond(at, int(pads[at]), int(used[at]))
            if self.cache_rows is not None:
                for at in (
                    (_by_sequence("cache_rows", self.cache_rows, self.cu_q) < 0).nonzero().flatten().tolist()
                ):
                    raise errors.negative_row(at)
            return used
        for name in ("left_pad_k", "cache_rows"):
            if getattr(self, name) is not None:
                raise errors.pages_with(name)
        table, size = self.pages, self.page_size
        assert size is not None
        check_table("pages", table, self.cu_q)
        used = self._used("k", torch.full((self.count,), table.size(1) * size))
        needed = torch.arange(table.size(1)) * size < used[:, None]
        for at, place in ((table.cpu() < 0) & needed).nonzero().tolist():
            raise errors.negative_page(at, place)
        return used

    @property
    def places(self) -> tuple[Places, Places]:
        """Those of queries and of keys; the same object if tokens have both."""
        queries = Packed.within(self.cu_q, self.used_q, self.total_q)
        if self.cu_k is self.cu_q and self.used_k is self.used_q:
            return queries, queries
        return queries, self._keys()

    def _keys(self) -> Places:
        if self.cu_k is not None:
            return Packed.within(self.cu_k, self.used_k, self.total_k)
        assert self.used_k is not None
        if self.pages is None:
            return Cached.within(self.cache_rows, self.left_pad_k, self.used_k, self.max_k)
        assert self.page_size is not None
        return Paged.within(self.pages, self.page_size, self.used_k)

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return self.cu_q.numel() - 1

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.cu_q.device

    def check_cache(self, name: str, rows: int, length: int) -> None:
        """Refuse a cache without a row for each sequence, or whose rows or pages have another length.

        Args:
            name: of the argument, for the message.
            rows: of the cache, or pages of the pool.
            length: of a row, or of a page.

        Raises:
            SequencesError: it does not fit.

        Example:
            >>> starts = torch.tensor([0, 1], dtype=torch.int32)
            >>> used = torch.tensor([9], dtype=torch.int32)
            >>> sequences = Sequences(starts, used_k=used)
            >>> try:
            ...     sequences.check_cache("k_cache", rows=1, length=8)
            ... except flex_inductor.FlexError as error:
            ...     print(error)
            k_cache: its rows have 8 tokens, and max_k is 9; expected at least as many.
        """
        if self.pages is None and self.cache_rows is None and rows < self.count:
            raise errors.too_few_rows(name, rows, self.count)
        if self.page_size is not None and length != self.page_size:
            raise errors.other_page_size(name, length, self.page_size)
        if self.page_size is None and length < self.max_k:
            raise errors.cache_too_short(name, length, self.max_k)

    @classmethod
    def unchecked(cls, cu_q: Tensor, cu_k: Tensor | None, **rest: Any) -> Sequences:
        """Make Sequences of tensors without reading values, as for a step that must not wait for the device.

        Args:
            cu_q: int32 [sequences + 1].
            cu_k: the same of packed keys, or None for keys in a cache.
            rest: all other fields that are not None, with `max_q`, `max_k` and the most tokens `total_q` and `total_k`.

        Example:
            >>> offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
            >>> numbers = {"max_q": 4, "max_k": 4, "total_q": 8, "total_k": 8}  # upper bounds
            >>> Sequences.unchecked(offsets, offsets, **numbers).count
            2
        """
        made = object.__new__(cls)
        for name in (*TENSORS, *_NUMBERS):
            object.__setattr__(made, name, rest.get(name))
        object.__setattr__(made, "cu_q", cu_q)
        object.__setattr__(made, "cu_k", cu_k)
        return made

    @classmethod
    def from_lengths(
        cls,
        lengths_q: Sequence[int] | Tensor,
        lengths_k: Sequence[int] | Tensor | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Sequences:
        """Make sequences of these lengths, one after the other.

        Args:
            lengths_q: of queries, as a list of integers or an integer tensor [sequences].
            lengths_k: of keys; those of the queries by default.
            device: of the result; that of a tensor by default.

        Raises:
            SequencesError: a length is negative, or their sum is beyond int32.
            FlexTypeError: they are no integers.

        Example:
            >>> Sequences.from_lengths([3, 0, 4]).cu_q
            tensor([0, 3, 3, 7], dtype=torch.int32)
        """
        cu_k = None if lengths_k is None else _summed("lengths_k", lengths_k, device)
        return cls(_summed("lengths_q", lengths_q, device), cu_k)

    @classmethod
    def from_padding_mask(cls, mask: Tensor) -> Sequences:
        """Make the sequences that `unpad` packs.

        Args:
            mask: bool [batch, length], True where there is a token.

        Raises:
            FlexTypeError: it has another dtype or shape.

        Example:
            >>> mask = torch.tensor([[True, True, False], [True, False, False]])
            >>> Sequences.from_padding_mask(mask).cu_q
            tensor([0, 2, 3], dtype=torch.int32)
        """
        check_padding_mask(mask)
        return cls.from_lengths(mask.sum(1), device=mask.device)

    @classmethod
    def from_nested(cls, query: Any, key: Any = None) -> Sequences:
        """Make the sequences of nested tensors.

        Args:
            query: jagged [sequences, jagged, ...].
            key: the same; `query` by default.

        Raises:
            FlexTypeError: one is no jagged nested tensor.

        Example:
            >>> parts = [torch.zeros(3, 8), torch.zeros(5, 8)]
            >>> nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
            >>> Sequences.from_nested(nested).cu_q
            tensor([0, 3, 8], dtype=torch.int32)
        """
        key = query if key is None else key
        for name, tensor in (("query", query), ("key", key)):
            if getattr(tensor, "layout", None) != torch.jagged:
                raise errors.not_jagged(name, tensor)
        offsets = [t.offsets().to(torch.int32) for t in (query, key)]
        used = [None if t.lengths() is None else t.lengths().to(torch.int32) for t in (query, key)]
        return cls(*offsets, used_q=used[0], used_k=used[1])

    def mask(
        self,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
        *,
        heads: int | None = None,
        block_size: int | tuple[int, int] | None = None,
    ) -> SequenceMask:
        """Find what attention visits within each sequence. Make it once a step, for all layers.

        No mask, causal ones and windows cost a few operations and read nothing on the host; others are analysed.

        Args:
            mask_mod: `mask_mod(sequence, h, q_idx, kv_idx)` with local positions.
            heads: the number of query heads, for a mask that reads h.
            block_size: tokens of a tile, or two numbers for (queries, keys); chosen by default.

        Returns:
            SequenceMask: for the block_mask of varlen_attention.

        Raises:
            SequencesError: heads or block size do not fit, or it is called inside of a compiled graph.
            MaskModError: the mask cannot be evaluated.

        Example:
            >>> sequences = Sequences.from_lengths([200, 56])
            >>> window = sequences.mask(masks.sliding_window(64))
            >>> query = torch.randn(256, 2, 8)
            >>> varlen_attention(query, query, query, sequences, block_mask=window).shape
            torch.Size([256, 2, 8])
        """
        return sequence_mask(self, mask_mod, heads, block_size)


def _summed(name: str, lengths: Sequence[int] | Tensor, device: Any) -> Tensor:
    if isinstance(lengths, (list, tuple)) and all(type(n) is int for n in lengths):
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype not in _INTEGERS:
        raise errors.not_integers(name, lengths)
    sums = torch.nn.functional.pad(lengths.to(device).cumsum(0), (1, 0))
    found = sums.cpu()
    if (found.diff() < 0).any() or found[-1] > _MOST:
        raise errors.bad_lengths(name, _MOST)
    return sums.to(torch.int32)


def _offsets(name: str, offsets: Any, cu_q: Tensor) -> Tensor:
    """The offsets on the host, checked."""
    check_offsets(name, offsets, cu_q)
    found = offsets.cpu().long()  # differences of int32 may wrap around
    if found[0] != 0 or (found.diff() < 0).any():
        raise errors.bad_offsets(name, found.tolist())
    return found


def _by_sequence(name: str, values: Any, cu_q: Tensor) -> Tensor:
    """A number for each sequence, on the host, its form checked."""
    check_numbers(name, values, cu_q)
    return values.cpu()


def check_offsets(name: str, offsets: Any, cu_q: Tensor) -> None:
    """Their form; these three read no values."""
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise errors.not_offsets(name, offsets)
    if offsets.device != cu_q.device:
        raise errors.other_device(name, offsets.device, cu_q.device)
    if offsets.numel() == 0:
        raise errors.no_first_offset(name)
    if offsets.numel() != cu_q.numel():
        raise errors.other_count(name, offsets.numel() - 1, cu_q.numel() - 1)


def check_numbers(name: str, values: Any, cu_q: Tensor) -> None:
    """One for each sequence."""
    count = cu_q.numel() - 1
    if not isinstance(values, Tensor) or values.dtype != torch.int32 or values.shape != (count,):
        raise errors.not_lengths(name, values, count)
    if values.device != cu_q.device:
        raise errors.other_device(name, values.device, cu_q.device)


def check_table(name: str, table: Any, cu_q: Tensor) -> None:
    """Of the pages of each sequence."""
    count = cu_q.numel() - 1
    if not isinstance(table, Tensor) or table.dtype != torch.int32 or table.dim() != 2 or len(table) != count:
        raise errors.bad_table(name, table, count)
    if table.device != cu_q.device:
        raise errors.other_device(name, table.device, cu_q.device)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MOST = torch.iinfo(torch.int32).max
TENSORS = ("cu_q", "cu_k", "used_q", "used_k", "left_pad_k", "cache_rows", "pages")


def _is_positive(number: Any) -> bool:
    return isinstance(number, int | torch.SymInt) and number > 0


_NUMBERS = ("page_size", "max_q", "max_k", "total_q", "total_k")


def _flatten(sequences: Sequences) -> tuple[dict[str, Any], tuple[Any, ...]]:
    tensors = {name: getattr(sequences, name) for name in TENSORS}
    return tensors, tuple(getattr(sequences, name) for name in _NUMBERS)


def _unflatten(tensors: Any, numbers: tuple[Any, ...]) -> Sequences:
    return Sequences.unchecked(
        *tensors[:2], **dict(zip((*TENSORS[2:], *_NUMBERS), (*tensors[2:], *numbers), strict=True))
    )


# Lists, as JSON has them.
pytrees.register(Sequences, _flatten, _unflatten, to_dumpable_context=list, from_dumpable_context=tuple)
torch.serialization.add_safe_globals([Sequences])  # saved programs hold the inputs of their example
