"""Train a small GPT on packed documents, with ALiBi slopes that it learns.

Several documents share a row, and tokens attend within their own. Prints the loss, compares all gradients with fp64
attention, and says which kernels served the calls.
"""

from __future__ import annotations

import argparse
import copy

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import flex_inductor
from flex_inductor.reference import reference

BATCH, LENGTH, VOCAB, WIDTH, HEADS, LAYERS = 4, 256, 64, 128, 4, 2


class Block(nn.Module):
    attend = staticmethod(flex_inductor.flex_attention)

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.slopes = nn.Parameter(flex_inductor.mods.alibi_slopes(HEADS))

    def forward(self, x: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        def alibi(score, b, h, q_idx, kv_idx):
            return score - self.slopes[h] * (q_idx - kv_idx)

        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, alibi, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        """The mean loss of the next tokens."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def packed_documents() -> tuple[Tensor, flex_inductor.BlockMask]:
    """Rows of documents that count, each by a step of its own, and the mask of their borders."""
    places = torch.arange(LENGTH).repeat(BATCH, 1)
    document = torch.searchsorted(torch.randint(24, 96, (BATCH, 12)).cumsum(1), places, right=True)
    first, step = torch.randint(1, 8, (2, BATCH, 13)).gather(2, document.expand(2, -1, -1))
    mask_mod = flex_inductor.masks.document(document)  # causal within each
    mask = flex_inductor.create_block_mask(mask_mod, BATCH, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=32)
    return (first + step * places) % VOCAB, mask


def largest_error(model: GPT, compiled, batch: tuple) -> float:
    """Of any parameter's gradient, relative to that of dense attention in fp64."""
    gold = copy.deepcopy(model).double()
    for block in gold.blocks:
        block.attend = lambda *call: reference(*call)[0]
    for net in (gold, compiled):
        net(*batch).backward()
    pairs = zip(model.parameters(), gold.parameters(), strict=True)
    return max(float((p.grad - g.grad).norm() / g.grad.norm().clamp_min(1e-12)) for p, g in pairs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on packed documents.")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    flex_inductor.decisions(clear=True)
    model = GPT()
    compiled = torch.compile(model, backend="flex_inductor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in track(range(given.steps), "training"):
        loss = compiled(*packed_documents())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step:2}  loss {loss.item():.3f}")
    print(*flex_inductor.decisions(), sep="\n\n")
    error = largest_error(model, compiled, packed_documents())
    print(f"\nlargest relative error of a gradient, next to fp64: {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
