"""Calls of attention as one process makes them, and as ranks make them of their parts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flex_inductor import AuxRequest, create_block_mask, flex_attention
from flex_inductor.distributed.context import context_parallel

RESULTS = (
    "out",
    "lse",
    "max_scores",
    "entropy",
    "max_indices",
    "d_query",
    "d_key",
    "d_value",
    "d_table",
    "d_gate",
)


class Case(NamedTuple):
    mask: str = "documents"
    length: int = 500
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    block: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float64
    score: bool = True
    sinks: bool = False  # those of a column of the table
    dropout: float = 0.0
    entropy: bool = False  # and the indices of the largest scores
    bshd: bool = False  # queries, keys and values lie in memory as [B, S, H, D]

    def tensors(self) -> list[Tensor]:
        """Query, key, value, the gradients from above of out and lse, a table and a gate."""
        generator = torch.Generator().manual_seed(3)
        rows = (self.batch, self.heads, self.length)
        shapes = [
            (*rows, 16),
            (self.batch, self.kv_heads, self.length, 16),
            (self.batch, self.kv_heads, self.length, 8),
            (*rows, 8),
            rows,
            (self.heads, 2 * self.length),
            (self.length,),
        ]
        return [
            torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype) for shape in shapes
        ]

    def score_mod(self, table: Tensor, gate: Tensor) -> Any:
        if not self.score:
            return None
        length = self.length

        def biased(score, b, h, q_idx, kv_idx):
            return score * torch.sigmoid(gate[q_idx] + gate[kv_idx]) + table[h, q_idx - kv_idx + length]

        return biased

    def block_mask(self) -> Any:
        length = self.length
        if self.mask == "none":
            return None
        if self.mask == "documents":
            document = (torch.arange(length)[:, None] >= torch.tensor([70, 75, 210, 390])).sum(1)

            def mod(b, h, q, kv):
                return (document[q] == document[kv]) & (q >= kv)

            sizes = (None, None)
        elif self.mask == "window":

            def mod(b, h, q, kv):
                return (q - kv < 40) & (q >= kv)

            sizes = (None, None)
        elif self.mask == "heads":  # each head another window

            def mod(b, h, q, kv):
                return ((q - kv).abs() <= 40 * h) & (kv % 7 != h)

            sizes = (None, self.heads)
        elif self.mask == "batches":
            lengths = torch.tensor([170, length, 300])

            def mod(b, h, q, kv):
                return (q >= kv) & (q < lengths[b]) & (kv < lengths[b])

            sizes = (self.batch, None)
        else:  # rows and whole tiles without a live lane, keys that nobody reads
            assert self.mask == "dead"

            def mod(b, h, q, kv):
                return (q >= kv) & (q >= 130) & (q < 380) & (kv >= 140)

            sizes = (None, None)
        return create_block_mask(mod, *sizes, length, length, "cpu", self.block, compact=True)


@functools.lru_cache(maxsize=64)
def whole(case: Case) -> dict[str, Tensor]:
    """What one fp64 process has."""
    return attend(case, [t.double() for t in case.tensors()], case.block_mask())


@functools.cache
def compiled() -> Any:
    """One for all cases, so that those alike share kernels. A rank of the tests serves more kinds than torch allows."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, backend="flex_inductor", fullgraph=True, dynamic=True)


def attend(
    case: Case, tensors: list[Tensor], mask: Any, attention: Any = flex_attention
) -> dict[str, Tensor]:
    """Forward and backward of one call."""
    query, key, value, grad_out, grad_lse, table, gate = tensors
    leaves = [t.requires_grad_() for t in (query, key, value, table, gate)]
    out, aux = attention(
        query, key, value, case.score_mod(table, gate), mask, enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True, entropy=case.entropy, max_indices=case.entropy), sinks=table[:, 7] if case.sinks else None,
        dropout_p=case.dropout, rng_state=(torch.tensor(5 << 40), torch.tensor(3)),
    )  # fmt: skip
    upstream = {out: grad_out, aux.lse: grad_lse} | ({aux.entropy: grad_lse.cos()} if case.entropy else {})
    grads = torch.autograd.grad([*upstream], leaves, [*upstream.values()], allow_unused=True)
    results = (out, aux.lse, aux.max_scores, aux.entropy, aux.max_indices, *grads)
    return {n: t.detach() for n, t in zip(RESULTS, results, strict=True) if t is not None}


@functools.cache
def mesh_of(group: Any) -> DeviceMesh:
    """All ranks as two rows, or as one."""
    ranks = torch.arange(group.size()).view(-1, 2 if group.size() > 1 else 1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "heads"))


def on_rank(
    group: Any, case: Case, method: str, balance: Any, is_compiled: bool = False
) -> dict[str, Tensor]:
    """What one rank has of it."""
    cp = context_parallel(mesh_of(group) if method == "ring_ulysses" else group, method, balance)
    mask = cp.plan(case.block_mask(), case.length, block=case.block[0])
    *rows, table, gate = case.tensors()
    rows = cp.shard(rows, 2)
    if case.bshd:
        rows[:3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in rows[:3]]
    found = attend(case, [*rows, table, gate], mask, compiled() if is_compiled else flex_attention)
    return {"positions": cp.layout.positions(cp.rank), **found}


def together(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' parts as one process has them; gradients of captures add up."""
    order = torch.cat([part["positions"] for part in parts]).argsort()
    found = {}
    for name in parts[0].keys() - {"positions"}:
        if name in ("d_table", "d_gate"):
            found[name] = torch.stack([part[name] for part in parts]).sum(0)
        else:
            found[name] = torch.cat([part[name] for part in parts], 2).index_select(2, order)
    return found
