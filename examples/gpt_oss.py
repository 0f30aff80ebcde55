"""Attention as gpt-oss has it: learnt sinks, grouped heads, and a window in every other layer.

All tokens are the same here, and each is to say how many tokens its document has so far. A softmax over equal tokens is
a mean, whatever their number, so attention cannot count. A sink takes a share of the weight and gives nothing: what
is left for the tokens grows with their number. `--plot FILE` draws the error with and without sinks.
"""

from __future__ import annotations

import argparse

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from flex_inductor import BlockMask, and_masks, create_block_mask, flex_attention, masks

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, WINDOW = 4, 256, 64, 4, 2, 16


class Layer(nn.Module):
    def __init__(self, sinks: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if sinks else None  # one score for each head

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        heads = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, sinks=self.sinks)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


class Model(nn.Module):
    def __init__(self, sinks: bool):
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer(sinks) for _ in range(2))

    def forward(self, layer_masks: list[BlockMask]) -> Tensor:
        x = self.token.expand(BATCH, LENGTH, -1)
        for layer, mask in zip(self.layers, layer_masks, strict=True):
            x = layer(x, mask)
        return self.head(x).squeeze(-1)


def documents() -> tuple[list[BlockMask], Tensor]:
    """The masks of the two layers, and how many tokens each token's document has up to it."""
    starts = (torch.rand(BATCH, LENGTH) < 1 / 32).int()
    starts[:, 0] = 1
    places = torch.arange(LENGTH)
    own = masks.document(starts.cumsum(1))
    return [
        create_block_mask(mask_mod, BATCH, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=32)
        for mask_mod in (and_masks(own, masks.sliding_window(WINDOW)), own)
    ], places + 1 - (starts * places).cummax(1).values


def train(sinks: bool, steps: int) -> list[float]:
    """By how many tokens the model is wrong, in the mean, at each step."""
    torch.manual_seed(0)
    model, errors = Model(sinks), []
    compiled = torch.compile(model, backend="flex_inductor", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in track(range(steps), "with sinks" if sinks else "without sinks"):
        layer_masks, counts = documents()
        log_counts = compiled(layer_masks)
        F.mse_loss(log_counts, counts.log()).backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(float((log_counts.detach().exp() - counts).abs().mean()))
    return errors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count by attention sinks.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="draw the errors (needs matplotlib)")
    given = parser.parse_args(arguments)
    errors = {name: train(name == "with sinks", given.steps) for name in ("with sinks", "without sinks")}
    for name, found in errors.items():
        last = found[-20:]
        print(f"{name}: wrong by {sum(last) / len(last):.1f} tokens")
    if given.plot:
        from matplotlib import pyplot

        for name, found in errors.items():
            pyplot.plot(found, label=name)
        pyplot.gca().set(xlabel="step", ylabel="tokens by which a count is wrong", yscale="log")
        pyplot.legend()
        pyplot.savefig(given.plot)


if __name__ == "__main__":
    main()
