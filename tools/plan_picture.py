"""The picture of a plan: the mask coloured by rank, and the work and bytes of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flex_inductor.masks.draw import EMPTY_COLOUR, MOST_CELLS, load_matplotlib, save
from flex_inductor.masks.runs import FULL, Runs, density

if TYPE_CHECKING:
    from flex_inductor.distributed.work import Reads, TileWork


def draw(title: str, work: TileWork, owner: Sequence[int], facts: dict[str, list[float]], path: str) -> None:
    """`facts` has the work of each rank, and the bytes that it receives and sends."""
    colours = rank_colours(len(facts["work"]))
    columns = len(work.masks) + 1
    figure = load_matplotlib().figure.Figure(figsize=(5.6 * columns - 1.2, 5.2))
    axes = figure.subplots(1, columns)
    for axis, mask in zip(axes, work.masks, strict=False):
        picture = image(work, mask, owner, colours).numpy()
        extent = (0, work.length, work.length, 0)
        axis.imshow(picture, extent=extent, interpolation="nearest", aspect="auto")
        axis.set(xlabel="key", ylabel="query")
    axes[0].set_title(title, fontsize=9)
    _bars(axes[-1], facts, colours)
    figure.tight_layout()
    save(figure, path, Path(path).suffix[1:])


def _bars(axis: Any, facts: dict[str, list[float]], colours: Tensor) -> None:
    """Work to the right, bytes to the left, each as a share of the most."""
    ranks = range(len(colours))
    moved = [max(pair) for pair in zip(facts["received"], facts["sent"], strict=True)]
    for sign, values in ((1, facts["work"]), (-1, moved)):
        most = max(values) or 1.0
        axis.barh(ranks, [sign * value / most for value in values], height=1.0, color=colours.numpy())
    axis.axvline(0, color="#333333", linewidth=0.8)
    axis.set(ylim=(len(colours) - 0.5, -0.5), xlim=(-1.05, 1.05), ylabel="rank")
    axis.set_xticks([-1, 0, 1], ["most bytes", "0", "most work"])
    mean = sum(facts["work"]) / len(colours)
    ratio = max(facts["work"]) / mean if mean else 1.0
    axis.set_title(f"work, max/mean {ratio:.3f}; bytes that cast gets or sends", fontsize=9)


def rank_colours(ranks: int) -> Tensor:
    """[ranks, 3], from 0 to 1: neighbouring ranks differ in hue, every third is darker."""
    from matplotlib.colors import hsv_to_rgb

    rank = torch.arange(ranks, dtype=torch.float64)
    hue = rank * 0.61803 % 1 if ranks > 12 else rank / ranks
    shade = torch.where(rank % 3 == 2, 0.62, 0.85)
    return torch.from_numpy(hsv_to_rgb(torch.stack([hue, torch.full_like(hue, 0.7), shade], 1).numpy()))


def image(work: TileWork, mask: Reads, owner: Sequence[int], colours: Tensor) -> Tensor:
    """[cells, cells, 3]: where nothing is read the colour of nothing, else that of the ranks that hold the rows."""
    from matplotlib.colors import to_rgb

    tiles = work.tiles
    cells = min(tiles, MOST_CELLS)
    kind = torch.full_like(mask.line, FULL, dtype=torch.int8)
    runs = Runs(tiles, tiles, mask.line, mask.start, mask.stop, kind)
    share = density(runs, 0, tiles, (cells, cells), FULL)
    edges = torch.arange(cells + 1) * tiles // cells
    cell = torch.searchsorted(edges, torch.arange(tiles), right=True) - 1
    rows = torch.zeros(cells, 3, dtype=torch.float64).index_add_(0, cell, colours[torch.tensor(owner)])
    rows = rows / edges.diff()[:, None]
    empty = torch.tensor(to_rgb(EMPTY_COLOUR), dtype=torch.float64)
    return (share[..., None] * rows[:, None] + (1 - share[..., None]) * empty).clamp(0, 1)
