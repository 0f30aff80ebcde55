"""DTensors outside of a plan: each rank attends with the batches and heads that it has, and mods see global ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import noop_mask

from ..attention import serve
from ..checks import check_block_mask, refused
from ..errors import FlexError, unplanned
from ..masks import planned
from ..masks.library.algebra import offset
from ..masks.schedule import schedule_parts
from ..op import Inputs, untraced
from ..softmax import AuxRequest, Softmax
from . import errors
from .dtensors import first_of, lifted, like, whole


class ShardedMask(planned.PlannedMask):
    """A call's mask, or None, and how its DTensors are served."""

    def __init__(self, mask: Any, query: Any, key: Any, value: Any, softmax: Softmax):
        self.mask = mask
        try:
            _check_placements(query, key, value)
            _check_dropout(query, softmax)
        except FlexError as error:
            refused(error)

    def attend(
        self,
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any,
        checks: Callable[..., None],
        call: Callable[..., Any],
        wanted: AuxRequest,
        softmax: Softmax,
    ) -> Any:
        captures: tuple[Any, ...] = ()
        parts: list[Tensor] = [tensor.to_local() for tensor in (query, key, value)]
        try:
            checks(*parts)
            softmax.check(query)
            if planned.needs_plan():
                raise unplanned("flex_attention")
            if self.mask is not None:
                untraced(check_block_mask, self.mask, query, key)
            if score_mod is not None and not torch.compiler.is_dynamo_compiling():
                score_mod, captures = lifted(score_mod, query, parts[0], None, 0, "")
        except FlexError as error:
            refused(error)
        batch, head = first_of(query, 0), first_of(query, 1)
        schedule, mask_mod = (None, None) if self.mask is None else schedule_parts(self.mask)
        if schedule is not None:
            batches, heads = parts[0].shape[:2]
            schedule = schedule.of_part(slice(batch, batch + batches), slice(head, head + heads))
        if batch or head:
            mask_mod = mask_mod if mask_mod in (None, noop_mask) else offset(mask_mod, b=batch, h=head)
            score_mod = None if score_mod is None else _from(score_mod, batch, head)
        if softmax.sinks is not None:
            softmax = softmax._replace(sinks=whole(softmax.sinks, query, None, 0, ""))
            softmax = softmax.of_heads(head, parts[0].size(1))
        softmax = softmax._replace(head_offset=softmax.head_offset + head)
        here = Inputs(schedule=schedule, score_captures=captures, **softmax.inputs(parts[0]))
        results = call(*parts, score_mod, mask_mod, here)
        return tuple(like(query, rows, query.size(2)) for rows in results)


def _from(score_mod: Callable[..., Tensor], batch: int, head: int) -> Callable[..., Tensor]:
    def shifted(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *captures: Tensor
    ) -> Tensor:
        return score_mod(score, b + batch, h + head, q_idx, kv_idx, *captures)

    return shifted


def _check_placements(query: Any, key: Any, value: Any) -> None:
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if not isinstance(tensor, DTensor):
            raise errors.not_a_dtensor(name)
        if tensor.device_mesh != query.device_mesh or tensor.placements != query.placements:
            raise errors.unlike_placements(name, tensor.placements, query.placements)
        if any(placement not in (Shard(0), Shard(1), Replicate()) for placement in tensor.placements):
            raise errors.unserved_placement(name, tensor.placements)
        for dim, what in enumerate(("batches", "heads")):
            ranks = _ranks_of(query, dim)
            if ranks > 1 and tensor.size(dim) != query.size(dim) and tensor.size(dim) % ranks:
                raise errors.parts_do_not_match(name, what, tensor.size(dim), query.size(dim), ranks)


def _ranks_of(tensor: Any, dim: int) -> int:
    """How many parts a dimension has."""
    ranks = 1
    for at, placement in enumerate(tensor.placements):
        if placement == Shard(dim):
            ranks *= tensor.device_mesh.size(at)
    return ranks


def _check_dropout(query: Any, softmax: Softmax) -> None:
    """The ranks' parts of one dropout: from one state, and numbered by heads alone."""
    if softmax.dropout_p and (softmax.rng_state is None or _ranks_of(query, 0) > 1):
        raise errors.dropout_of_dtensors(query.placements)


serve("dtensors", ShardedMask)
