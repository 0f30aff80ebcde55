"""How a mod looks up values by its lanes.

Only indexing is guarded: a lane that is not live may hold an index that is out of range. Other ways to look values up,
such as index_select, become indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from .writes import storage_of


def is_lane_index(index: Any) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dim() == 0
        and not index.dtype.is_floating_point
        and index.dtype != torch.bool
    )


class LaneIndexing(TorchFunctionMode):
    """Lets a mod index a captured tensor by 0-d tensors without turning them into Python numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            tensor, key, *value = args
            key = key if isinstance(key, tuple) else (key,)
            if any(is_lane_index(index) for index in key):
                return _index_by_lanes(tensor, key, *value)
        if func in (torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip):
            return _clamp(*args, **kwargs)
        found = _LOOKUPS[func](*args, **kwargs) if func in _LOOKUPS else None
        return func(*args, **kwargs) if found is None else found


def _index_by_lanes(tensor: Tensor, key: tuple, *value: Any) -> Tensor:
    """`tensor[key]`, or `tensor[key] = value`."""
    if Ellipsis in [index for index in key if not isinstance(index, Tensor)]:
        at = next(i for i, index in enumerate(key) if index is Ellipsis)
        named = sum(index is not None for index in key) - 1
        key = key[:at] + (slice(None),) * (tensor.dim() - named) + key[at + 1 :]
    # Other indices apply first. The dimensions that lanes index then come to the front.
    others = tuple(
        # Tensor.__getitem__ would make a constant of a symbol.
        slice(None) if is_lane_index(index) or isinstance(index, torch.SymInt) else index
        for index in key
    )
    if not all(isinstance(index, slice) and index == slice(None) for index in others):
        tensor = tensor[others]
    surviving = [index for index in key if not isinstance(index, int)]
    for dim in reversed(range(len(surviving))):
        if isinstance(surviving[dim], torch.SymInt):
            tensor = tensor.select(dim, surviving.pop(dim))
    dims = [dim for dim, index in enumerate(surviving) if is_lane_index(index)]
    if dims != list(range(len(dims))):
        tensor = tensor.permute(*dims, *(dim for dim in range(tensor.dim()) if dim not in dims))
    indices = [surviving[dim] for dim in dims]
    if value:
        filler = torch.as_tensor(value[0], dtype=tensor.dtype, device=tensor.device)
        return torch.ops.aten.index_put_(tensor, indices, filler)
    return torch.ops.aten.index.Tensor(tensor, indices)


def sizes_at_positions(graph: fx.GraphModule, count: int) -> Iterator[tuple[int, Any]]:
    """Which of the graph's last `count` arguments it looks up at q_idx or kv_idx, and the size there."""
    arguments = graph.graph.find_nodes(op="placeholder")
    captures = arguments[len(arguments) - count :]
    positions = arguments[len(arguments) - count - 2 : len(arguments) - count]
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.index.Tensor:
            tensor, indices = node.args
            if (source := storage_of(tensor)) in captures:
                for size, index in zip(tensor.meta["val"].shape, indices, strict=False):
                    if index in positions:
                        yield captures.index(source), size


def _clamp(input, min=None, max=None, **more):
    # A number that was lifted is a 0-d tensor by now; torch takes two numbers or two tensors.
    if isinstance(min, Tensor) != isinstance(max, Tensor) and min is not None and max is not None:
        min, max = (torch.as_tensor(bound, device=input.device) for bound in (min, max))
    return torch.clamp(input, min, max, **more)


def _rows(input: Tensor, index: Tensor) -> Tensor:
    """input[index]. A single index stays a 0-d tensor, which has the simplest gradient."""
    if index.numel() != 1:
        return torch.ops.aten.index.Tensor(input, [index])
    return torch.ops.aten.index.Tensor(input, [index.reshape(())]).reshape((*index.shape, *input.shape[1:]))


def _take(input: Tensor, index: Tensor) -> Tensor:
    return _rows(input.reshape(-1), index)


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return _rows(input.movedim(dim, 0), index.reshape(-1)).movedim(0, dim)


def _gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if input.dim() <= 1:
        return _rows(input.reshape(-1), index)
    positions = [torch.arange(size, device=index.device) for size in index.shape]
    grid = list(torch.meshgrid(*positions, indexing="ij"))
    grid[dim] = index
    return torch.ops.aten.index.Tensor(input, grid)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    return _torch_embedding(weight, input, -1 if padding_idx is None else padding_idx % weight.size(0))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if scale_grad_by_freq:
        return None
    found = _rows(weight, indices)
    if padding_idx < 0:
        return found
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)


# Each gives None for a call that does more than look values up.
_LOOKUPS: dict[Callable, Callable[..., Tensor | None]] = {
    torch.take: _take,
    Tensor.take: _take,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    torch.gather: _gather,
    Tensor.gather: _gather,
    torch.nn.functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
}
