"""Clean noisy pictures by attention to neighbours, with a bias for each offset that it learns.

Every pixel is a token and sees the 7 x 7 pixels around it. The bias depends on how far down and right a key lies, as in
Swin; its gradient adds up in the kernel over all pixels. `--plot FILE` draws a picture before and after, and the bias.
"""

from __future__ import annotations

import argparse

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import flex_inductor
from flex_inductor import create_block_mask, flex_attention, masks

BATCH, SIDE, WINDOW, WIDTH, HEADS, NOISE = 4, 32, 7, 32, 2, 0.3
PIXELS, REACH = SIDE * SIDE, WINDOW - 1  # at a border, the nearest 7 reach further


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * REACH + 1, 2 * REACH + 1))

    def forward(self, x: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        def by_offset(score, b, h, q_idx, kv_idx):
            down, right = kv_idx // SIDE - q_idx // SIDE, kv_idx % SIDE - q_idx % SIDE
            return score + self.bias[h, down + REACH, right + REACH]

        q, k, v = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(q, k, v, by_offset, mask).transpose(1, 2).flatten(2))


class Cleaner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Neighbours() for _ in range(2))

    def forward(self, noisy: Tensor, mask: flex_inductor.BlockMask) -> Tensor:
        x = self.embed(noisy.flatten(1)[..., None])
        for layer in self.layers:
            x = layer(x, mask)
        return noisy + self.head(x).view_as(noisy)


def pictures() -> Tensor:
    """[BATCH, SIDE, SIDE]: three disks each, of any brightness."""
    place = torch.arange(SIDE)
    down, right, radius = (
        torch.randint(low, SIDE // high, (3, BATCH, 1, 1)) for low, high in ((0, 1), (0, 1), (4, 3))
    )
    inside = (place[:, None] - down) ** 2 + (place - right) ** 2 < radius**2
    return (inside * torch.rand(3, BATCH, 1, 1)).amax(0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Clean noisy pictures.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--plot", metavar="FILE", help="draw what is learnt (needs matplotlib)")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    mask = create_block_mask(masks.neighborhood((SIDE, SIDE), WINDOW), None, None, PIXELS, PIXELS, "cpu")
    print(f"{mask.sparsity():.0f}% of the blocks are skipped")
    model = Cleaner()
    compiled = torch.compile(model, backend="flex_inductor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in track(range(given.steps), "training"):
        clean = pictures()
        noisy = clean + NOISE * torch.randn_like(clean)
        cleaned = compiled(noisy, mask)
        loss = F.mse_loss(cleaned, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == given.steps - 1:
            print(f"step {step:3}  error {loss.item() ** 0.5:.3f}, of the noisy picture {NOISE}")
    if given.plot:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 4, figsize=(12, 3), layout="constrained")
        bias = model.layers[0].bias[0].detach()
        shown = {"noisy": noisy[0], "cleaned": cleaned[0].detach(), "clean": clean[0], "bias of a head": bias}
        for axis, (title, picture) in zip(axes, shown.items(), strict=True):
            axis.imshow(picture.numpy(), cmap="gray")
            axis.set(title=title, xticks=[], yticks=[])
        figure.savefig(given.plot)


if __name__ == "__main__":
    main()
