"""Attention as a kernel computes it, in dense fp32 with its roundings, and with faults that kernels have had."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flex_inductor.mod_ir.arguments import MASK_LANES, SCORE_LANES
from flex_inductor.mod_ir.split import programs
from flex_inductor.mod_ir.trace import trace_joint, trace_value
from flex_inductor.op import Inputs, call_text
from flex_inductor.op.call import QKV

LENGTH, HEADS, HEAD_DIM = 96, 2, 16
ROWS = slice(64, 96)  # of queries, and a block of keys that they see
KEYS = slice(32, 64)
FORWARD = ("out", "lse", "max_scores", "entropy", "max_indices")


def score_mod(score, b, h, q_idx, kv_idx, slopes, table):
    return score - slopes[h] * (q_idx - kv_idx) + table[kv_idx // 8]


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    table: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    grad_entropy: Tensor
    scale: float

    @staticmethod
    def of(dtype: torch.dtype, seed: int = 0) -> Call:
        generator = torch.Generator().manual_seed(seed)
        shape = (1, HEADS, LENGTH, HEAD_DIM)
        query, key, value, grad_out = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
        slopes = torch.tensor([0.25, 0.0625])
        sizes = (LENGTH // 8, shape[:3], shape[:3])
        table, grad_lse, grad_entropy = (torch.randn(size, generator=generator) for size in sizes)
        return Call(query, key, value, slopes, table, grad_out, grad_lse, grad_entropy, HEAD_DIM**-0.5)

    def arguments(self, *, backward: bool = False) -> list:
        """What both ops of verify begin with."""
        captures = (self.slopes, self.table)
        score = trace_value(score_mod, SCORE_LANES, self.query, captures)
        mask = trace_value(mask_mod, MASK_LANES, self.query, ())
        joint = trace_joint(score_mod, self.query, captures, [True] * 3) if backward else None
        mods = programs(score, mask, joint, guarded=True)
        inputs = Inputs(captures, grad_entropy=self.grad_entropy if backward else None)
        text, tensors = call_text.dump(inputs, mods, self.scale, QKV if backward else ())
        return [*self[:3], tensors, text, ""]


class Kernel:
    """One forward and one backward; `fault` names a place where it goes wrong by `amount`, or as the name says."""

    def __init__(self, call: Call, fault: str = "", amount: float = 1.01):
        self.call, self.fault, self.amount = call, fault, amount
        place = torch.arange(LENGTH)
        self.distance = place[:, None] - place
        self.dead = self.distance < 0
        self.bucket = place // 8

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left @ right, the left factor a tile of what the kernel holds."""
        right = right.float()
        if self.fault == f"{name} row":  # one row of the right factor stands where its neighbour should
            right = right.clone()
            right[0, 1, 40] = right[0, 1, 41]
        result = left @ right
        if self.fault == f"{name} block":
            rows, summed = (KEYS, ROWS) if "^T" in name else (ROWS, KEYS)
            result[:, :, rows] -= left[:, :, rows, summed] @ right[:, :, summed]
        return result * (self.amount if self.fault == name else 1.0)

    def scores(self, name: str) -> Tensor:
        call = self.call
        key = call.key.float()
        if self.fault == f"{name} block":  # the tile before is still there
            key = key.clone()
            key[:, :, KEYS] = key[:, :, :32]
        raw = call.query.float() @ key.transpose(-1, -2) * call.scale
        raw = raw * (self.amount if self.fault == name else 1.0)
        bias = call.slopes[:, None, None] * self.distance - call.table[self.bucket]
        return (raw - bias).masked_fill(self.dead, -math.inf)

    def forward(self) -> tuple[Tensor, ...]:
        """The output, and what FORWARD names of rows."""
        scores = self.scores("QK")
        peak = scores.amax(-1, keepdim=True)
        weight = (scores - peak).exp()
        total = weight.sum(-1, keepdim=True)
        out = self.product("PV", weight.to(self.call.value.dtype).float(), self.call.value) / total
        share = weight / total
        entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
        lse, peak = (peak + total.log()).squeeze(-1), peak.squeeze(-1)
        rows = dict(zip(FORWARD[1:], (lse, peak, entropy, scores.argmax(-1)), strict=True))
        if self.fault in rows:
            rows[self.fault][0, 1, 70] += 1 if self.fault == "max_indices" else 1e-3
        return out.to(self.call.query.dtype), *rows.values()

    def backward(self, out: Tensor, lse: Tensor) -> list[Tensor]:
        call, dtype = self.call, self.call.query.dtype
        scores = self.scores("weights")
        weight = (scores - lse.unsqueeze(-1)).exp()
        d_out = call.grad_out.float()
        delta = (d_out * out.float()).sum(-1) - call.grad_lse
        delta = self.changed("delta", delta)
        slope = (
            d_out @ call.value.float().transpose(-1, -2) * (self.amount if self.fault == "dO V^T" else 1.0)
        )
        grad = weight * (slope - delta.unsqueeze(-1))
        of_entropy = self.changed("entropy's gradient", call.grad_entropy)
        grad -= weight * weight.clamp(min=1e-30).log() * of_entropy.unsqueeze(-1)
        rounded = grad.to(dtype).float()
        d_query = self.product("dS K", rounded, call.key) * call.scale
        d_key = self.product("dS^T Q", rounded.transpose(-1, -2), call.query) * call.scale
        d_value = self.product("P^T dO", weight.to(dtype).float().transpose(-1, -2), call.grad_out)
        d_slopes = -(grad * self.distance).sum((0, 2, 3))
        d_table = torch.zeros_like(call.table).index_add_(0, self.bucket, grad.sum((0, 1, 2)))
        grads = [t.to(dtype) for t in (d_query, d_key, d_value)]
        names = ("d_q", "d_k", "d_v", "d_captures[0]", "d_captures[1]")
        return [
            self.changed(name, grad) for name, grad in zip(names, (*grads, d_slopes, d_table), strict=True)
        ]

    def changed(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        if self.fault == name:
            tensor *= self.amount
        elif self.fault == f"{name} part":
            tensor[..., -1] *= self.amount
        elif self.fault == f"{name} stale":
            tensor = tensor.roll(1, min(2, tensor.dim() - 1))
        return tensor
