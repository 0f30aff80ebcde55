"""Train a small causal transformer on CPU: ALiBi with learnt slopes, and a document mask.

Prints the loss, a check of outputs and gradients against the fp64 reference, and which route served
each attention call and why.
"""

from __future__ import annotations

import copy
import time

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import flex_inductor
from flex_inductor.reference import reference

BATCH, LENGTH, VOCAB, WIDTH, HEADS, LAYERS, STEPS = 4, 256, 64, 128, 4, 2, 60
console = Console(highlight=False)


class Attention(nn.Module):
    def __init__(self, attend=flex_inductor.flex_attention):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.exp2(-8 * (torch.arange(HEADS) + 1) / HEADS))

    def forward(self, x: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        def alibi(score, b, h, q_idx, kv_idx):
            return score - self.slopes[h] * (q_idx - kv_idx)

        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, score_mod=alibi, block_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        x = self.embed(tokens)
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norm, strict=True):
            x = x + attention(norm(x), mask)
            x = x + mlp(x)
        return self.head(x)


def packed_documents() -> tuple[Tensor, Tensor]:
    """Rows of counting sequences, each document with a step of its own, and which document a token is in."""
    lengths = torch.randint(24, 96, (BATCH, LENGTH // 24))
    ends = lengths.cumsum(1)
    position = torch.arange(LENGTH).expand(BATCH, -1)
    document = (position.unsqueeze(-1) >= ends.unsqueeze(1)).sum(-1)
    step = torch.randint(1, 8, (BATCH, LENGTH // 24 + 1)).gather(1, document)
    first = torch.randint(0, VOCAB, (BATCH, LENGTH // 24 + 1)).gather(1, document)
    return (first + step * position) % VOCAB, document


def document_mask(document: Tensor) -> flex_inductor.BlockMask:
    def same_document_and_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[b, q_idx] == document[b, kv_idx])

    return flex_inductor.create_block_mask(
        same_document_and_causal, BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32
    )


def loss_of(model: nn.Module, tokens: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
    logits = model(tokens, mask)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def check_against_fp64(model: Transformer, compiled: nn.Module, tokens: Tensor, mask) -> float:
    """The largest relative error of any parameter's gradient against dense fp64 attention."""
    gold = copy.deepcopy(model).double()
    for module in gold.attention:
        module.attend = lambda *args, **kwargs: reference(*args, **kwargs)[0]
    errors = []
    for net in (gold, compiled):
        net.zero_grad()
        loss_of(net, tokens, mask).backward()
    for expected, got in zip(gold.parameters(), model.parameters(), strict=True):
        errors.append(((got.grad - expected.grad).norm() / expected.grad.norm().clamp_min(1e-12)).item())
    return max(errors)


def main() -> None:
    torch.manual_seed(0)
    model = Transformer()
    compiled = torch.compile(model, backend="flex_inductor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for step in range(STEPS):
        tokens, document = packed_documents()
        loss = loss_of(compiled, tokens, document_mask(document))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            console.print(f"step {step:3d}  loss {loss.item():.3f}  {time.perf_counter() - start:5.1f} s")

    tokens, document = packed_documents()
    error = check_against_fp64(model, compiled, tokens, document_mask(document))
    console.print(f"\nlargest relative error of a gradient against the fp64 reference: {error:.1e}")
    assert error < 1e-4, "the gradients do not match the reference"

    console.print("\nattention calls compiled:")
    for decision in flex_inductor.decisions():
        console.print(f"{decision}\n", soft_wrap=True)
    assert flex_inductor.decisions(), "no attention call was compiled by flex_inductor"


if __name__ == "__main__":
    main()
