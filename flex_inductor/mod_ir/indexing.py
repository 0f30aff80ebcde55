"""How a mod looks up values by its lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from .lookups import as_indexing
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
        found = as_indexing(func, args, kwargs)
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


def _clamp(tensor, min=None, max=None):
    # A number that was lifted is a 0-d tensor by now; torch takes two numbers or two tensors.
    if isinstance(min, Tensor) != isinstance(max, Tensor) and min is not None and max is not None:
        min, max = (torch.as_tensor(bound, device=tensor.device) for bound in (min, max))
    return torch.clamp(tensor, min, max)
