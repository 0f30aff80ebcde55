"""How a mod looks up values by its lanes.

Only indexing is guarded: a lane that is not live may hold an index that is out of range. Other ways to look values up,
such as index_select, become indexing.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from .writes import storage_of


def is_lane_index(index: Any) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dim() == 0
        and not index.dtype.is_floating_point
        and index.dtype != torch.bool
    )


def is_list_of_numbers(index: Any) -> bool:
    found = list(tree_iter([*index])) if isinstance(index, list | range) else []
    return bool(found) and all(isinstance(number, int) for number in found)


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
    key = _spelled_out(tensor, key)
    if any(_is_advanced(index) for index in key):
        return _write_by_lanes(tensor, key, *value) if value else _with_advanced(tensor, key)
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
    indices = [surviving[dim] for dim in dims]
    tensor = _to_front(tensor, dims)
    if value:
        filler = torch.as_tensor(value[0], dtype=tensor.dtype, device=tensor.device)
        return torch.ops.aten.index_put_(tensor, indices, filler)
    return torch.ops.aten.index.Tensor(tensor, indices)


def _spelled_out(tensor: Tensor, key: tuple) -> tuple:
    """The key with Python's integers for NumPy's, and slices for an ellipsis."""
    key = tuple(operator.index(index) if _is_foreign_integer(index) else index for index in key)
    at = next((i for i, index in enumerate(key) if index is Ellipsis), None)
    if at is None:
        return key
    rest = tensor.dim() - sum(map(_consumes, (*key[:at], *key[at + 1 :])))
    return key[:at] + (slice(None),) * rest + key[at + 1 :]


def _is_foreign_integer(index: Any) -> bool:
    return not isinstance(index, (Tensor, int)) and isinstance(index, numbers.Integral)


def _is_advanced(index: Any) -> bool:
    """Whether it adds dimensions of its own, or shares those of others like it."""
    if isinstance(index, bool):
        return True
    return not (index is None or isinstance(index, int | slice | torch.SymInt) or is_lane_index(index))


def _consumes(index: Any) -> int:
    """How many dimensions of a tensor it is for."""
    if index is None or isinstance(index, bool):
        return 0
    is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    return index.dim() if is_mask else 1


def _with_advanced(tensor: Tensor, key: tuple) -> Tensor:
    """`tensor[key]`. As integers do, lanes and symbols apply before what has dimensions of its own."""
    ends = itertools.accumulate(map(_consumes, key))
    first = {end - 1: index for end, index in zip(ends, key, strict=True) if _applies_first(index)}
    rest = tuple(index for index in key if not _applies_first(index))
    for dim in reversed(first):
        if isinstance(first[dim], torch.SymInt):
            tensor = tensor.select(dim, first.pop(dim))
            first = {at - (at > dim): index for at, index in first.items()}
    return torch.ops.aten.index.Tensor(_to_front(tensor, list(first)), list(first.values()))[rest]


def _applies_first(index: Any) -> bool:
    return is_lane_index(index) or isinstance(index, torch.SymInt)


def _write_by_lanes(tensor: Tensor, key: tuple, value: Any) -> Tensor:
    places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    places = _with_advanced(places, key)
    filler = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device).expand(places.shape)
    return tensor.copy_(tensor.reshape(-1).index_put((places,), filler).view(tensor.shape))


def _to_front(tensor: Tensor, dims: list[int]) -> Tensor:
    if dims == list(range(len(dims))):
        return tensor
    return tensor.permute(*dims, *(dim for dim in range(tensor.dim()) if dim not in dims))


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


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return _rows(input.reshape(-1), indices.reshape(-1))
    sizes = [*torch.broadcast_shapes(input.select(dim, 0).shape, indices.select(dim, 0).shape)]
    sizes.insert(dim % input.dim(), -1)
    return _gather(input.expand(sizes), dim, indices.expand(sizes))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    return torch.nn.functional.one_hot(tensor.long(), num_classes)  # takes no other integers


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
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
}
