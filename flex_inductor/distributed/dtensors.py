"""DTensors as queries, keys and values, and as captures of mods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..mod_ir.arguments import SCORE_LANES
from ..mod_ir.capture import lift
from . import errors
from .exchange import unshard
from .layout import Layout


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
    sequence = False
    for dim, placement in enumerate(placements):
        if mesh.get_group(dim).group_name == group:
            sequence = placement == Shard(2)
            if not sequence:
                raise errors.bad_placement("query", placements, mesh)
        elif placement == Shard(1):
            if mask_heads > 1:
                raise errors.heads_under_tp(mask_heads)
        elif placement not in (Shard(0), Replicate()):
            raise errors.bad_placement("query", placements, mesh)
    if not sequence:
        raise errors.bad_placement("query", placements, mesh)
    parts = [tensor.to_local() for tensor in (query, key, value)]
    return *parts, partial(like, query, length=length), first_of(query, 1)


def first_of(tensor: Any, dim: int) -> int:
    """Where this rank's part begins: torch cuts it into chunks, for one dimension of the mesh after another."""
    first, size = 0, tensor.size(dim)
    for at, placement in enumerate(tensor.placements):
        if placement == Shard(dim):
            chunk = -(-size // tensor.device_mesh.size(at))
            before = min(chunk * tensor.device_mesh.get_local_rank(at), size)
            first, size = first + before, min(chunk, size - before)
    return first


def like(given: Any, result: Tensor, length: int) -> DTensor:
    """A result of this rank's batches and heads, and of `length` rows in all, as a DTensor with placements as given."""
    size = torch.Size((*given.shape[:2], length, *result.shape[3:]))
    stride = [1] * len(size)
    for dim in reversed(range(len(size) - 1)):
        stride[dim] = stride[dim + 1] * size[dim + 1]
    mesh, placements = given.device_mesh, given.placements
    return DTensor.from_local(
        result.contiguous(), mesh, placements, run_check=False, shape=size, stride=tuple(stride)
    )


def lifted(
    score_mod: Any, query: Any, local_query: Tensor, layout: Layout | None, rank: int, group: str
) -> tuple[Any, tuple[Any, ...]]:
    """score_mod as a function of its lanes and captures, and the captures: DTensors whole, as plain tensors."""
    mod, captures = lift(score_mod, SCORE_LANES, local_query)
    return mod, tuple(whole(capture, query, layout, rank, group) for capture in captures)


def whole(tensor: Any, query: Any, layout: Layout | None, rank: int, group: str) -> Any:
    """A DTensor whole, as a plain tensor."""
    return _whole(tensor, _replicated(query), layout, rank, group) if isinstance(tensor, DTensor) else tensor


def _replicated(query: Any) -> set[str]:
    """The process groups whose ranks all compute the same."""
    if not isinstance(query, DTensor):
        return set()
    mesh = query.device_mesh
    return {
        mesh.get_group(dim).group_name for dim, at in enumerate(query.placements) if isinstance(at, Replicate)
    }


def _whole(capture: DTensor, alike: set[str], layout: Any, rank: int, group: str) -> Tensor:
    """The whole tensor. Its gradient is partial over ranks that compute different things.

    Sharded along the plan's ranks it has this rank's tokens, as queries do.
    """
    mesh = capture.device_mesh
    sharded: int | None = None
    placements: list[Any] = [Replicate()] * mesh.ndim
    gradients: list[Any] = []
    for dim, at in enumerate(capture.placements):
        name = mesh.get_group(dim).group_name
        gradients.append(Replicate() if name in alike else Partial())
        if name == group and not isinstance(at, Replicate):
            if not isinstance(at, Shard):
                raise errors.capture_placement(capture.placements)
            sharded = at.dim
            placements[dim] = gradients[dim] = at
    if sharded is not None:
        _check_tokens(capture, capture.to_local().size(sharded), layout, rank)
    if capture.placements != tuple(placements):  # its backward would reduce partial gradients
        capture = capture.redistribute(placements=placements)
    local = capture.to_local(grad_placements=gradients)
    if sharded is None:
        return local
    return unshard(local, sharded, layout, rank, group, partial=True)


def _check_tokens(capture: DTensor, length: int, layout: Layout, rank: int) -> None:
    """A parameter that torch has chunked may be as long as this rank's tokens and belong to others."""
    chunk = -(-layout.length // layout.ranks)
    first = torch.arange(layout.length)[rank * chunk :][:length]
    if length != layout.lengths[rank]:
        raise errors.capture_length(length, layout.lengths[rank], rank)
    if capture.is_leaf and capture.requires_grad and not torch.equal(first.int(), layout.positions(rank)):
        raise errors.sharded_parameter(capture.placements)
