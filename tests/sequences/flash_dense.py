"""What FlashAttention's documentation says, written out densely."""

from __future__ import annotations

import math

import torch


def dense(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, seen=None
):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    score = q @ k.transpose(-1, -2) * (softmax_scale or q.size(-1) ** -0.5)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    i = torch.arange(q.size(2))[:, None] + k.size(2) - q.size(2)
    j = torch.arange(k.size(2))
    if alibi_slopes is not None:
        score = score - alibi_slopes[..., None, None] * (i - j).abs()
    live = torch.ones_like(score[0, 0], dtype=torch.bool)
    left, right = window_size
    if causal:
        right = 0
    if left >= 0:
        live &= j >= i - left
    if right >= 0:
        live &= j <= i + right
    if seen is not None:
        live &= seen(i, j)
    dead = ~live.any(-1)
    score = score.masked_fill(~live, -math.inf)
    lse = torch.logsumexp(score.masked_fill(dead[:, None], 0), -1).masked_fill(dead, -math.inf)
    weight = torch.softmax(score.masked_fill(dead[:, None], 0), -1).masked_fill(dead[:, None], 0)
    return (weight.to(v.dtype) @ v).transpose(1, 2), lse
