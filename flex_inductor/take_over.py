"""`take_over()`: torch's flex_attention and create_block_mask run this project's code for a while.

Inside a function compiled with backend="flex_inductor" torch's op is served without it (`torch_calls.py`). What torch's
Python wrapper refuses before there is an op (on CPU: gradients and max_scores) needs `take_over()`.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from torch.nn.attention import flex_attention as torch_flex


def _attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    from flex_inductor.attention import flex_attention

    return flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


def _block_mask(
    mask_mod,
    B,
    H,
    Q_LEN,
    KV_LEN,
    device=None,
    BLOCK_SIZE=128,
    _compile=False,
    separate_full_blocks=True,
    compute_dq_write_order=False,
    dq_kv_order=True,
):
    from flex_inductor.masks import create_block_mask

    return create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, separate_full_blocks,
        compute_dq_write_order, dq_kv_order,
    )  # fmt: skip


_PAIRS = ((torch_flex.flex_attention, _attention), (torch_flex.create_block_mask, _block_mask))
_SWAPPED = ("__code__", "__defaults__", "__kwdefaults__")


class take_over:
    """Have torch's flex_attention and create_block_mask run our code until `undo()` or the end of the `with` block.

    Needed for what torch's wrapper refuses on CPU: gradients and auxiliary outputs. The function objects stay torch's
    and get our code, so modules that have imported them by name are served as well. They have torch's code again once
    every take_over has ended, in whatever threads and order.

    Example:
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> query = torch.randn(1, 2, 16, 8, requires_grad=True)
        >>> with flex_inductor.take_over():
        ...     flex_attention(query, query, query).sum().backward()  # torch alone raises here
        >>> query.grad.shape
        torch.Size([1, 2, 16, 8])
        >>> taken = flex_inductor.take_over()  # without a block
        >>> taken.undo()
    """

    _lock = threading.Lock()
    _holders: ClassVar[set[take_over]] = set()
    _torchs: ClassVar[list[list[Any]]] = []  # torch's own code, while its functions have ours

    def __init__(self) -> None:
        with self._lock:
            if not self._holders:
                self._torchs[:] = [[getattr(torchs, name) for name in _SWAPPED] for torchs, _ in _PAIRS]
                for torchs, ours in _PAIRS:
                    _set(torchs, [getattr(ours, name) for name in _SWAPPED])
            self._holders.add(self)

    def undo(self) -> None:
        """End this take_over. After the last one torch's functions have their own code back."""
        with self._lock:
            if self not in self._holders:
                return
            self._holders.remove(self)
            if not self._holders:
                for (torchs, _), attributes in zip(_PAIRS, self._torchs, strict=True):
                    _set(torchs, attributes)

    def __enter__(self) -> take_over:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def _set(function: Any, attributes: list[Any]) -> None:
    for name, value in zip(_SWAPPED, attributes, strict=True):
        setattr(function, name, value)
