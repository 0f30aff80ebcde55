"""What the inspector's tests look into, in a file of its own: reports name its lines."""

import torch

from flex_inductor import Sequences, create_block_mask, flash, flex_attention, varlen_attention

LENGTH = 256


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def block_mask(mask_mod):
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=64)


def inputs(dtype=torch.float16, heads=2, head_dim=32, requires_grad=False):
    shape = (1, heads, LENGTH, head_dim)
    return tuple(torch.zeros(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(3))


def plain_causal():
    mask = block_mask(causal)

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=mask)

    return attend, inputs()


def alibi_documents():
    document = torch.arange(LENGTH) // 100
    slopes = torch.tensor([0.5, 0.25])

    def same_document(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    def alibi(score, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        return score + slopes[h] * distance

    mask = block_mask(same_document)

    def attend(q, k, v):
        return flex_attention(q, k, v, alibi, mask)

    return attend, inputs()


class LearnableBias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2, 2 * LENGTH))
        self.mask = block_mask(causal)

    def relative(self, score, b, h, q_idx, kv_idx):
        return score + torch.tanh(self.bias[h, q_idx - kv_idx + LENGTH])

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.relative, self.mask)


def learnable_bias():
    return LearnableBias(), inputs(requires_grad=True)


def refused():
    """No fused kernel takes float64."""
    return lambda q, k, v: flex_attention(q, k, v, lambda s, *_: 20 * torch.tanh(s / 20)), inputs(
        torch.float64
    )


class Layer(torch.nn.Module):
    def __init__(self, mask, width=64, heads=2):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.heads, self.mask = heads, mask

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + flex_attention(q, k, v, block_mask=self.mask).transpose(1, 2).flatten(-2)


def twelve_layers():
    mask = block_mask(causal)
    model = torch.nn.Sequential(*(Layer(mask) for _ in range(12))).half()
    return model, (torch.zeros(1, LENGTH, 64, dtype=torch.float16),)


def no_attention():
    return torch.nn.functional.relu, (torch.zeros(4),)


def fails():
    return 1 // 0


def two_devices():
    return flex_attention, tuple(
        torch.zeros(1, 1, 16, 16, device=device) for device in ("cpu", "meta", "cpu")
    )


SLOPES = torch.tensor([0.5, 0.25])


def packed():
    two = Sequences.from_lengths([100, 156])

    def attend(x):
        made_here = lambda score, b, h, q_idx, kv_idx: score * SLOPES[h]  # noqa: E731
        return varlen_attention(x, x, x, two, score_mod=made_here)

    return attend, (torch.zeros(LENGTH, 2, 32),)


def by_flash():
    return lambda x: flash.flash_attn_func(x, x, x, causal=True), (torch.zeros(1, LENGTH, 2, 32),)
