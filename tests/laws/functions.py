"""A function that keeps every law, and for each law one that breaks it. Both commands and tests take them."""

import itertools

import torch

from flex_inductor import create_block_mask, flex_attention

BATCH, HEADS, TOKENS, DIM, BLOCK = 2, 2, 80, 16, 32
LENGTHS = [30, 50]
IDS = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))


def inputs():
    generator = torch.Generator().manual_seed(0)
    sizes = [(BATCH, heads, TOKENS, DIM) for heads in (HEADS, 1, 1)]
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_document(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (IDS[q_idx] == IDS[kv_idx])


def block_mask(mask_mod, tokens=TOKENS):
    return create_block_mask(mask_mod, None, None, tokens, tokens, "cpu", BLOCK)


def attention(score_mod=None, mask_mod=causal_document, **kwargs):
    mask = None if mask_mod is None else block_mask(mask_mod)

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, **kwargs)

    return attend


def tilt():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)

    def tilted(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx) / 8

    return tilted


def right():
    return attention(tilt()), inputs()


def masked():
    """What score_mod leaves out still has its value multiplied, by 0."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -torch.inf)

    return attention(score_mod, None), inputs()


def shift():
    """Scores of which fp32 keeps too few digits."""
    return attention(lambda score, b, h, q_idx, kv_idx: score + 100_000), inputs()


def permutation():
    """A mod that gives another answer each time."""
    count = itertools.count()

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + kv_idx * next(count)

    return attention(score_mod), inputs()


def documents():
    return attention(mask_mod=causal), inputs()


def schedule():
    """Blocks of a window that has grown since."""
    window = torch.tensor(8)

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    mask = block_mask(mask_mod)
    window.fill_(60)

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    return attend, inputs()


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def gradients():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - HalfGradient.apply(slopes[h]) * (q_idx - kv_idx) / 8

    return attention(score_mod), inputs()


def compiled():
    attend = attention(tilt())

    def twice(q, k, v):
        return attend(q, k, v) * (2 if torch.compiler.is_compiling() else 1)

    return twice, inputs()


def batch():
    """A bias that is the mean over the batch."""
    mask = block_mask(causal_document)

    def attend(q, k, v):
        bias = k.detach().mean((0, 1, 3))
        return flex_attention(
            q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx], mask, enable_gqa=True
        )

    return attend, inputs()


def raises():
    def attend(q, k, v):
        raise ZeroDivisionError("one by zero")

    return attend, inputs()


def attends(q, k, v):
    return flex_attention(q, k, v, block_mask=block_mask(causal, q.size(2)), enable_gqa=True)
