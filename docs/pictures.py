"""Panels of the gallery's pictures as SVG, coloured by the site's style sheet, and their thumbnails."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor

SIDE = 240  # of a panel, in units of the SVG
THUMBNAIL = (400, 280)
# Of thumbnails, on light and dark pages alike: red, green, blue and opacity.
FULL, PARTIAL = (58, 124, 165, 255), (242, 165, 65, 255)
UNSEEN, EMPTY = (242, 165, 65, 70), (128, 140, 158, 45)
LESS, MORE = FULL[:3], PARTIAL[:3]


class Panel(NamedTuple):
    svg: str
    thumbnail: Image.Image


def tiles(partial: Tensor, full: Tensor, title: str, alt: str) -> Panel:
    """One square for each tile."""
    kinds = {"full": full > 0.5, "partial": partial > 0.5, "empty": (partial + full) < 0.5}
    colours = {"full": FULL, "partial": PARTIAL, "empty": EMPTY}
    return Panel(_cells(kinds, title, alt), _cells_thumbnail(kinds, colours))


def tokens(seen: Tensor, block: int, title: str, alt: str) -> Panel:
    """One square for each pair, coloured by its tile too."""
    live, whole = _over_tiles(seen, block, torch.amax), _over_tiles(seen, block, torch.amin)
    kinds = {"full": whole, "partial": seen & ~whole, "unseen": live & ~seen, "empty": ~live}
    colours = {"full": FULL, "partial": PARTIAL, "unseen": UNSEEN, "empty": EMPTY}
    return Panel(_cells(kinds, title, alt), _cells_thumbnail(kinds, colours))


def heat(bias: Tensor, seen: Tensor | None, title: str, alt: str) -> Panel:
    """A bias: blue takes from the score, orange adds, and more of either is stronger."""
    seen = torch.ones_like(bias, dtype=torch.bool) if seen is None else seen
    most = bias[seen].abs().max().item() or 1.0
    strength = (bias.abs() / most).clamp(max=1)
    colour = torch.where((bias < 0)[..., None], torch.tensor(LESS), torch.tensor(MORE))
    opacity = torch.where(seen, 40 + 215 * strength, 0)
    pixels = torch.cat([colour, opacity[..., None].to(torch.int64)], -1).to(torch.uint8)
    image = Image.fromarray(pixels.numpy(), "RGBA")
    file = io.BytesIO()
    image.save(file, "PNG")
    rows, columns = bias.shape
    width, height = _extent(rows, columns)
    data = base64.b64encode(file.getvalue()).decode()
    size = f'width="{width:.4g}" height="{height:.4g}" preserveAspectRatio="none"'
    body = f'<image {size} href="data:image/png;base64,{data}"/>'
    low, high = (f"{x:.3g}" for x in (bias[seen].min(), bias[seen].max()))
    return Panel(_svg(body, width, height, f"{title}: {low} to {high}", alt), _framed(image))


def curve(x: Tensor, y: Tensor, title: str, alt: str) -> Panel:
    """A function of the score, within a square around zero."""
    most = x.abs().max().item()
    points = [((a / most + 1) / 2, (1 - b / most) / 2) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    path = " ".join(f"{a * SIDE:.1f},{b * SIDE:.1f}" for a, b in points)
    axes = f'<path class="axes" d="M0 {SIDE / 2}H{SIDE}M{SIDE / 2} 0V{SIDE}"/>'
    diagonal = f'<path class="axes" stroke-dasharray="4" d="M0 {SIDE}L{SIDE} 0"/>'
    image = Image.new("RGBA", (4 * SIDE, 4 * SIDE), EMPTY)
    ImageDraw.Draw(image).line(
        [(a * 4 * SIDE, b * 4 * SIDE) for a, b in points], fill=PARTIAL, width=36, joint="curve"
    )
    body = f'{axes}{diagonal}<polyline class="curve" points="{path}"/>'
    return Panel(_svg(body, SIDE, SIDE, f"{title}, -{most:g} to {most:g}", alt), _framed(image))


def figure(panels: Sequence[str], caption: str, keyed: bool) -> str:
    """Panels side by side."""
    names = ("full", "partial", "unseen", "empty")
    key = "".join(f'<span class="key {name}">{name}</span>' for name in names) if keyed else ""
    return (
        f'<figure><div class="panels">{"".join(panels)}</div>'
        f"<figcaption>{html.escape(caption)} {key}</figcaption></figure>"
    )


def _over_tiles(seen: Tensor, block: int, reduce) -> Tensor:
    """What `reduce` says of each pair's tile; a tile that is not whole is never full."""
    rows, columns = seen.shape
    padding = (0, -columns % block, 0, -rows % block)
    padded = torch.nn.functional.pad(seen, padding)
    tiled = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    spread = reduce(tiled, (1, 3), keepdim=True).expand_as(tiled).reshape(padded.shape)
    return spread[:rows, :columns]


def _extent(rows: int, columns: int) -> tuple[float, float]:
    return SIDE * columns / max(rows, columns), SIDE * rows / max(rows, columns)


def _cells(kinds: dict[str, Tensor], title: str, alt: str) -> str:
    rows, columns = next(iter(kinds.values())).shape
    width, height = _extent(rows, columns)
    scale = width / columns
    paths = []
    for name, cells in kinds.items():
        steps = [
            f"M{start} {row}h{stop - start}v1h{start - stop}z"
            for row, line in enumerate(cells.tolist())
            for start, stop in _runs(line)
        ]
        if steps:
            paths.append(f'<path class="{name}" transform="scale({scale:.5g})" d="{"".join(steps)}"/>')
    return _svg("".join(paths), width, height, title, alt)


def _runs(line: Sequence[bool]) -> list[tuple[int, int]]:
    """Where neighbouring cells are set, from start to stop."""
    edges = [i for i in range(len(line) + 1) if (i > 0 and line[i - 1]) != (i < len(line) and line[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _svg(body: str, width: float, height: float, title: str, alt: str) -> str:
    frame = f'<rect class="frame" width="{width:.4g}" height="{height:.4g}"/>'
    return (
        f'<div><svg viewBox="-1 -1 {width + 2:.4g} {height + 2:.4g}" role="img" aria-label="{html.escape(alt)}" '
        f'shape-rendering="crispEdges">{body}{frame}</svg><span>{title}</span></div>'
    )


def _cells_thumbnail(kinds: dict[str, Tensor], colours: dict[str, tuple[int, ...]]) -> Image.Image:
    pixels = sum(cells[..., None] * torch.tensor(colours[name]) for name, cells in kinds.items())
    return _framed(Image.fromarray(pixels.to(torch.uint8).numpy(), "RGBA"))


def _framed(image: Image.Image) -> Image.Image:
    """Enlarged into the middle of a thumbnail, with round corners."""
    room = (THUMBNAIL[0] - 20, THUMBNAIL[1] - 20)
    factor = min(room[0] / image.width, room[1] / image.height)
    if factor >= 1:
        whole = max(math.floor(factor), 1)
        image = image.resize((image.width * whole, image.height * whole), Image.Resampling.NEAREST)
    else:
        image = image.resize(
            (round(image.width * factor), round(image.height * factor)), Image.Resampling.LANCZOS
        )
    corners = Image.new("L", (4 * image.width, 4 * image.height))
    ImageDraw.Draw(corners).rounded_rectangle((0, 0, corners.width - 1, corners.height - 1), 48, fill=255)
    round_edges = corners.resize(image.size, Image.Resampling.LANCZOS)
    clear = Image.new("L", image.size)
    image.putalpha(Image.composite(image.getchannel("A"), clear, round_edges))
    thumbnail = Image.new("RGBA", THUMBNAIL, (0, 0, 0, 0))
    thumbnail.paste(image, ((THUMBNAIL[0] - image.width) // 2, (THUMBNAIL[1] - image.height) // 2))
    return thumbnail
