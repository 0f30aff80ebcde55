"""torch's ways into context parallelism: a ParallelStyle, and a context manager with buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..masks import causal
from . import errors
from .context import ContextParallel


class ContextParallelStyle(ParallelStyle):
    """For `parallelize_module`: the module's forward runs inside of `with cp:`.

    Its calls of scaled_dot_product_attention are served, and calls of flex_attention need a planned mask.
    """

    def __init__(self, cp: ContextParallel):
        self.cp = cp
        self.entered: list[bool] = []  # of the calls under way

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda *_: self._enter())
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)
        return module

    def _enter(self) -> None:
        self.entered.append(False)
        self.cp.__enter__()
        self.entered[-1] = True

    def _leave(self) -> None:
        if self.entered.pop():
            self.cp.__exit__(None, None, None)


@contextlib.contextmanager
def sharded_buffers(
    cp: ContextParallel,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Sequence[Tensor] | set[Tensor] = (),
) -> Iterator[ContextParallel]:
    """`with cp:`, in which buffers hold this rank's part of what they held, in place.

    At the end they hold the whole again, but for `no_restore_buffers`. Without a plan, one is made for a causal mask.
    """
    if len(buffers) != len(buffer_seq_dims):
        raise errors.other_count("sharded_buffers: buffer_seq_dims", len(buffer_seq_dims), len(buffers))
    seen: set[int] = set()
    for i, storage in enumerate(buffer.untyped_storage() for buffer in buffers):
        if storage.nbytes() > buffers[i].nbytes or storage.data_ptr() in seen:
            raise errors.shared_storage(i)
        seen |= {storage.data_ptr()} - {0}  # an empty one's
    if cp.layout is None and buffers:
        cp.plan(causal(), buffers[0].size(buffer_seq_dims[0]), device=buffers[0].device)
    kept: list[Any] = []
    restored = [all(buffer is not other for other in no_restore_buffers) for buffer in buffers]
    with torch.no_grad():
        parts = cp.shard(list(buffers), list(buffer_seq_dims))
        for buffer, part, restore in zip(buffers, parts, restored, strict=True):
            kept.append(buffer.clone() if restore else None)
            buffer.resize_(part.shape).copy_(part)
    try:
        with cp:
            yield cp
    finally:
        with torch.no_grad():
            for buffer, whole in zip(buffers, kept, strict=True):
                if whole is not None:
                    buffer.resize_(whole.shape).copy_(whole)
