"""DTensors as queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import errors


def local_tensors(
    query: Any, key: Any, value: Any, group: str, mask_heads: int, length: int
) -> tuple[Any, Any, Any, Callable[[Any], Any], int]:
    """As PlannedMask.local: `group` has the sequence, other dimensions of the mesh may have batches and heads."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            raise errors.not_a_dtensor(name)
        if tensor.device_mesh != query.device_mesh or tensor.placements != query.placements:
            raise errors.bad_placement(name, tensor.placements, tensor.device_mesh)
    mesh, placements = query.device_mesh, query.placements
    first, sequence = 0, False
    for dim, placement in enumerate(placements):
        if mesh.get_group(dim).group_name == group:
            sequence = placement == Shard(2)
            if not sequence:
                raise errors.bad_placement("query", placements, mesh)
        elif placement == Shard(1):
            if mask_heads > 1:
                raise errors.heads_under_tp(mask_heads)
            first = first * mesh.size(dim) + mesh.get_local_rank(dim)
        elif placement not in (Shard(0), Replicate()):
            raise errors.bad_placement("query", placements, mesh)
    if not sequence:
        raise errors.bad_placement("query", placements, mesh)
    whole = (query.size(0), query.size(1), length)
    parts = [tensor.to_local() for tensor in (query, key, value)]

    def like_query(result: Any) -> Any:
        size = torch.Size((*whole, *result.shape[3:]))
        stride = [1] * len(size)
        for dim in reversed(range(len(size) - 1)):
            stride[dim] = stride[dim + 1] * size[dim + 1]
        return DTensor.from_local(
            result.contiguous(), mesh, placements, run_check=False, shape=size, stride=tuple(stride)
        )

    return *parts, like_query, first * parts[0].size(1)
