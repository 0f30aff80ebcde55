"""Sliding tiles in a video: a cube of tokens sees the cubes around it, in time, height and width.

Row by row, a block of tokens has parts of many cubes, and many blocks are visited for few of their pairs. Ordered by
cubes, a block is a cube, seen whole or not at all. The result is the same. `--plot FILE` draws both schedules.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import median

import torch
from rich.progress import track
from torch import Tensor

from flex_inductor import BlockMask, create_block_mask, flex_attention, masks

CUBE, HEADS, HEAD_DIM = (2, 8, 8), 2, 64  # 128 tokens, as a block has


def sliding_tiles(height: int, width: int, ordered: bool):
    """Pairs whose cubes touch, for tokens row by row or `ordered` by cubes."""
    down, across = height // CUBE[1], width // CUBE[2]  # cubes in a frame

    def cube_of(index):
        if ordered:
            index = index // math.prod(CUBE)
            return index // (down * across), index // across % down, index % across
        time, row, column = index // (height * width), index // width % height, index % width
        return time // CUBE[0], row // CUBE[1], column // CUBE[2]

    def mask_mod(b, h, q_idx, kv_idx):
        near = [(q - kv).abs() <= 1 for q, kv in zip(cube_of(q_idx), cube_of(kv_idx), strict=True)]
        return near[0] & near[1] & near[2]

    return mask_mod


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None) -> Tensor:
    return flex_attention(query, key, value, block_mask=mask)


def step(run, tokens: Tensor, mask: BlockMask | None) -> tuple[list[Tensor], float]:  # results, ms
    inputs = [part.clone().requires_grad_() for part in tokens]
    start = time.perf_counter()
    out = run(*inputs, mask)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    return [out.detach(), *gradients], (time.perf_counter() - start) * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Attend to neighbours in a video.")
    parser.add_argument(
        "--video", type=int, nargs=3, default=(8, 24, 32), metavar=("FRAMES", "HEIGHT", "WIDTH")
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", metavar="FILE", help="draw the schedules (needs matplotlib)")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    video = given.video
    length = math.prod(video)
    by_rows, by_cubes = (
        create_block_mask(sliding_tiles(*video[1:], ordered), None, None, length, length, "cpu")
        for ordered in (False, True)
    )
    order = masks.neighborhood_order(video, CUBE)  # where each token of the new order lies in the old one
    tokens = torch.randn(3, 1, HEADS, length, HEAD_DIM)  # queries, keys and values, row by row
    calls = {
        "no mask": (tokens, None),
        "row by row": (tokens, by_rows),
        "by cubes": (tokens[..., order, :], by_cubes),
    }
    run = torch.compile(attend, backend="flex_inductor", fullgraph=True)
    results = {name: step(run, *call)[0] for name, call in calls.items()}  # compiles
    for rows, cubes in zip(results["row by row"], results["by cubes"], strict=True):
        torch.testing.assert_close(rows[..., order, :], cubes)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in track(range(given.rounds), "measuring"):
        for name, call in calls.items():
            times[name].append(step(run, *call)[1])
    for name, (_, mask) in calls.items():
        skipped = 0 if mask is None else mask.sparsity()
        print(f"{name:10}  {median(times[name]):7.1f} ms, {skipped:.0f}% of the blocks skipped")
    if given.plot:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 2, figsize=(9, 5), layout="constrained")
        for axis, (title, mask) in zip(
            axes, {"row by row": by_rows, "by cubes": by_cubes}.items(), strict=True
        ):
            axis.imshow(mask.to_dense()[0, 0].numpy(), cmap="Blues")
            axis.set(title=f"{title}: blocks visited", xlabel="blocks of keys", ylabel="blocks of queries")
        figure.savefig(given.plot)


if __name__ == "__main__":
    main()
