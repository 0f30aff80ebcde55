"""Rows that go to the ranks that need them, and their gradients that come back.

The routes of rows are data, so other numbers of rows need no other graph. Gradients of a row that went to several ranks
are added in the order of the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import compat, upward
from ..kept import Kept
from ..op.library import define
from . import errors
from .layout import Layout


class Traffic(NamedTuple):
    """How many rows go to each rank and come from each: int64, on the CPU, where torch.distributed reads them."""

    sent: Tensor
    received: Tensor
    came: Tensor  # int32, an entry for each row that comes: where it is in the whole sequence

    def reversed(self, rows: Tensor) -> Traffic:
        """The counts of the way back; `rows` has an entry for each row that was sent."""
        return Traffic(self.received, self.sent, rows)


class Picked(NamedTuple):
    """The rows of a tensor that are sent: first those to rank 0, then those to rank 1, and so on."""

    rows: Tensor  # int64
    by_row: Tensor  # int64, the order in which copies of one row are neighbours
    copies: Tensor  # int64, how many copies there are of each row of the tensor


class Cast(NamedTuple):
    """The keys and values that a rank sends and receives."""

    picked: Picked
    traffic: Traffic


def picked(rows: Tensor, length: int) -> Picked:
    """Of a tensor with `length` rows."""
    return Picked(rows, torch.argsort(rows, stable=True), torch.bincount(rows, minlength=length))


def process_group(name: Any) -> dist.ProcessGroup:
    return _resolve_process_group(name)


def send_keys(
    key: Tensor, value: Tensor, sent: Cast, group: str, plan: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The keys and values [B, H, rows, dim] that come to this rank, and stand-ins for them.

    The stand-ins get the gradients, in fp32 until those of all ranks are added.
    """
    both = torch.cat([key, value], -1).permute(2, 0, 1, 3)
    came, *stand_ins = _Cast.apply(both, key.size(-1), *sent.picked, *sent.traffic, plan, group)
    key, value = came.permute(1, 2, 0, 3).split([key.size(-1), value.size(-1)], -1)
    return key, value, tuple(t.permute(1, 2, 0, 3) for t in stand_ins)


def move(rows: Tensor, traffic: Traffic, group: str, plan: Tensor | None = None) -> Tensor:
    """The rows that come to this rank: those of rank 0 first, then those of rank 1, and so on.

    At the first use of a `plan`, ranks compare it and what they send.
    """
    return _Move.apply(rows, *traffic, plan, group)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, width, rows, by_row, copies, sent, received, came, plan, group):
        ctx.save_for_backward(by_row, copies, sent, received)
        ctx.group, ctx.dtype = group, tensor.dtype
        out = exchanged(tensor.index_select(0, rows), sent, received, came.size(0), group, plan)
        ctx.mark_non_differentiable(out)
        # As mod_ir's `score_dtype`, into which Dynamo does not trace.
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        zero = out.new_zeros((), dtype=wide)
        return out, *(zero.expand(*out.shape[:-1], size) for size in (width, out.size(-1) - width))

    @staticmethod
    def backward(ctx, _, d_key, d_value):
        by_row, copies, sent, received = ctx.saved_tensors
        grad = torch.cat([d_key, d_value], -1)
        copied = exchanged(grad, received, sent, by_row.size(0), ctx.group)
        ordered = copied.index_select(0, by_row).flatten(1)
        summed = torch.segment_reduce(ordered, "sum", lengths=copies, axis=0, initial=0, unsafe=True)
        summed = summed.view(copies.size(0), *grad.shape[1:]).to(ctx.dtype)
        return summed, None, None, None, None, None, None, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, came, plan, group):
        ctx.save_for_backward(sent, received)
        ctx.group, ctx.count = group, rows.size(0)
        return exchanged(rows, sent, received, came.size(0), group, plan)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.saved_tensors
        return exchanged(grad, received, sent, ctx.count, ctx.group), None, None, None, None, None


def unshard(tensor: Tensor, dim: int, layout: Layout, rank: int, group: str, partial: bool = False) -> Tensor:
    """A rank's gradient of the whole is the same as on all ranks, or with `partial` one summand of it."""
    came = torch.cat([layout.positions(other) for other in range(layout.ranks)])
    received = torch.tensor(layout.lengths)
    traffic = Traffic(torch.full_like(received, layout.lengths[rank]), received, came)
    rows = tensor.movedim(dim, 0)
    copies = (rows if partial else rows.detach()).expand(layout.ranks, *rows.shape).flatten(0, 1)
    whole = move(copies, traffic, group).index_select(0, torch.argsort(came).to(tensor.device))
    if not partial:  # through which the gradient goes
        whole = whole.index_copy(0, layout.positions(rank).long().to(tensor.device), rows)
    return whole.movedim(0, dim)


def exchanged(
    rows: Tensor, sent: Tensor, received: Tensor, count: Any, group: str, plan: Tensor | None = None
) -> Tensor:
    out = torch.ops.flex_inductor.send_rows(rows, sent, received, count, plan, group)
    return waited(out, group)


def waited(coming: Tensor, group: str) -> Tensor:
    """What an exchange gives, once it is there."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops._c10d_functional.wait_tensor(coming)
    with named(group):
        return torch.ops._c10d_functional.wait_tensor(coming)


def _send_rows(rows, sent, received, count, plan, group):
    """Begins to send. Reading the result waits for it."""
    if plan is not None:
        agree(plan, rows.shape[1:], rows.dtype, group)
    rows, out = rows.contiguous(), rows.new_empty((count, *rows.shape[1:]))
    with named(group):
        work = dist.all_to_all_single(
            out, rows, received.tolist(), sent.tolist(), group=process_group(group), async_op=True
        )
    torch._C._distributed_c10d._register_work(out, work)
    return out


def _send_rows_fake(rows, sent, received, count, plan, group):
    return rows.new_empty((count, *rows.shape[1:]))


define(
    "send_rows",
    "(Tensor rows, Tensor sent, Tensor received, SymInt count, Tensor? plan, str group) -> Tensor",
    _send_rows,
    _send_rows_fake,
)
compat.when_imported("torch._inductor.lowering", lambda _: upward.exchange())

_agreed: Kept[bool] = Kept(4096)  # groups and planned masks on which all ranks agree


def agree(plan: Tensor, shape: Any, dtype: torch.dtype, group: str) -> None:
    """Raise unless all ranks have this plan and tensors like these.

    Asked once for each planned mask, not for each plan: a rank that already knows a plan would not ask, and one that
    does not would wait for it.
    """
    number, made = plan.tolist()
    key = (group, made)
    if _agreed.get(key):
        return
    found: list[Any] = [None] * dist.get_world_size(process_group(group))
    with named(group):
        mine = (f"{number:x}", str([*shape]), str(dtype))
        dist.all_gather_object(found, mine, group=process_group(group))
    for what, values in zip(("plans", "shapes", "dtypes"), zip(*found, strict=True), strict=True):
        if len(set(values)) > 1:
            raise errors.ranks_differ(what, list(values))
    _agreed.put(key, True)


@contextlib.contextmanager
def named(group: str) -> Iterator[None]:
    """A line of ours on top of torch.distributed's errors."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise errors.peer_gone(group) from error
