"""Pictures of masks: tiles in colour, one chosen tile token by token, sparsity in the title."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from .analysis.trace import name_of
from .errors import FlexError, MaskArgumentError, not_drawable
from .library.blockmask import create_block_mask
from .runs import FULL, PARTIAL, density
from .schedule import RunSchedule

FORMATS = (".png", ".svg")
EMPTY_COLOUR, PARTIAL_COLOUR, FULL_COLOUR = "#f4f4f2", "#f2a541", "#2f6690"
MOST_CELLS = 512


def draw_mask(
    mask: Callable | BlockMask | RunSchedule,
    path: str | Path | None = None,
    *,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
    b: int = 0,
    h: int = 0,
    zoom: tuple[int, int] | None = None,
) -> Any:
    r"""Draw one (b, h) of a mask.

    Beyond 512 tiles a side, a cell of the picture stands for several tiles and mixes their colours.

    Args:
        mask: a mask_mod, a BlockMask or a RunSchedule.
        path: of a .png or .svg file.
        B: the number of batches, for a mask_mod that reads `b`.
        H: the number of heads, for a mask_mod that reads `h`.
        Q_LEN: the number of queries, for a mask_mod.
        KV_LEN: the number of keys, for a mask_mod.
        BLOCK_SIZE: tokens of a tile, for a mask_mod.
        device: of what a mask_mod captures.
        b: the batch that is drawn.
        h: the head that is drawn.
        zoom: (row, column) of a tile whose tokens are drawn beside.

    Returns:
        matplotlib.figure.Figure: or None with `path`.

    Raises:
        MaskArgumentError: the file has another ending, a mask_mod lacks its lengths, or `b`, `h` or `zoom` is outside.
        FlexTypeError: `mask` is none of the three.
        FlexError: matplotlib is not installed.

    Example:
        >>> figure = flex_inductor.draw_mask(masks.causal(), Q_LEN=512, KV_LEN=512, zoom=(1, 1))
        >>> print(*(axis.get_title() for axis in figure.axes), sep="\n")
        causal: 512 x 512, tiles of 128 x 128, sparsity 37.50%
        tile (1, 1): 8256 of 16384 pairs
    """
    matplotlib = load_matplotlib()
    if path is not None and Path(path).suffix not in FORMATS:
        raise MaskArgumentError(
            f"draw_mask: path: expected a name ending in .png or .svg, got {str(path)!r}."
        )
    schedule = _schedule_of(mask, B, H, Q_LEN, KV_LEN, BLOCK_SIZE, device)
    if 0 in schedule.seq_lengths:
        raise MaskArgumentError(
            f"draw_mask: mask: expected queries and keys to draw, got {' x '.join(map(str, schedule.seq_lengths))}."
        )
    for name, index, size in (("b", b, schedule.batch), ("h", h, schedule.heads)):
        if not 0 <= index < size:
            raise MaskArgumentError(f"draw_mask: {name}: expected 0 to {size - 1}, got {index}.")
    if path is None:
        from matplotlib import pyplot

        return _drawn(pyplot.figure, schedule, b, h, zoom)  # for pyplot.show() and notebooks
    save(_drawn(matplotlib.figure.Figure, schedule, b, h, zoom), path, Path(path).suffix[1:])
    return None


def _drawn(new_figure: Callable, schedule: RunSchedule, b: int, h: int, zoom: tuple[int, int] | None) -> Any:
    figure = new_figure(figsize=(6 if zoom is None else 11, 5.6), layout="tight")
    axes = figure.subplots(1, 1 if zoom is None else 2, squeeze=False)
    _draw_tiles(axes[0][0], schedule, b, h)
    if zoom is not None:
        _draw_tokens(axes[0][1], axes[0][0], schedule, b, h, zoom)
    return figure


def to_html(mask: BlockMask | RunSchedule) -> str:
    """What a notebook shows of a block mask: its drawing, or its text where matplotlib is missing."""
    nothing = 0 in mask.seq_lengths
    schedule = RunSchedule.from_block_mask(mask) if isinstance(mask, BlockMask) else mask
    if nothing or find_spec("matplotlib") is None:
        text = schedule if nothing else mask  # torch has no text of an empty BlockMask
        return f"<pre style='line-height:1'>{text}</pre>"
    picture = io.StringIO()
    save(_drawn(load_matplotlib().figure.Figure, schedule, 0, 0, None), picture, "svg")
    return picture.getvalue()[picture.getvalue().index("<svg") :]


RunSchedule._repr_html_ = to_html  # type: ignore[attr-defined]  # what notebooks show


def load_ipython_extension(ipython: Any) -> None:
    """Have notebooks draw torch's BlockMasks: `%load_ext flex_inductor.masks`. RunSchedules are drawn without it.

    Args:
        ipython: what IPython passes.

    Example:
        >>> from types import SimpleNamespace
        >>> drawn = {}
        >>> html = SimpleNamespace(for_type=drawn.__setitem__)
        >>> formatter = SimpleNamespace(formatters={"text/html": html})
        >>> shell = SimpleNamespace(display_formatter=formatter)
        >>> masks.load_ipython_extension(shell)  # IPython passes its own shell
        >>> drawn[flex_inductor.BlockMask].__name__
        'to_html'
    """
    ipython.display_formatter.formatters["text/html"].for_type(BlockMask, to_html)


def save(figure: Any, to: Any, form: str) -> None:
    # A fixed salt and no date make the same mask the same file; text stays text.
    with load_matplotlib().rc_context({"svg.hashsalt": "flex_inductor", "svg.fonttype": "none"}):
        figure.savefig(to, format=form, metadata={"Date": None} if form == "svg" else None, dpi=150)


def load_matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise FlexError("A picture needs matplotlib: pip install 'flex-inductor[draw]'.") from error
    return matplotlib


def _schedule_of(mask: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, block: Any, device: Any) -> RunSchedule:
    if isinstance(mask, RunSchedule):
        return mask
    if isinstance(mask, BlockMask):
        return RunSchedule.from_block_mask(mask)
    if not callable(mask):
        raise not_drawable(mask)
    if Q_LEN is None or KV_LEN is None:
        raise MaskArgumentError("draw_mask: a mask function also needs Q_LEN and KV_LEN.")
    return create_block_mask(mask, B, H, Q_LEN, KV_LEN, device, block, compact=True)


def tile_shares(schedule: RunSchedule, b: int = 0, h: int = 0) -> tuple[Tensor, Tensor]:
    """The partial and full share of each cell of the picture, at most MOST_CELLS a side."""
    rows, columns = schedule.extent.tiles
    batch, heads = schedule.grids
    grid = min(b, batch - 1) * heads + min(h, heads - 1)
    cells = (min(rows, MOST_CELLS), min(columns, MOST_CELLS))
    runs = schedule.row_runs()
    partial, full = (density(runs, grid * rows, rows, cells, kind) for kind in (PARTIAL, FULL))
    return partial.cpu(), full.cpu()


def _draw_tiles(axis: Any, schedule: RunSchedule, b: int, h: int) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    partial, full = tile_shares(schedule, b, h)
    empty = 1 - partial - full
    colours = {"full": FULL_COLOUR, "partial": PARTIAL_COLOUR, "empty": EMPTY_COLOUR}
    layers = [
        share[..., None] * torch.tensor(to_rgb(colours[name]))
        for name, share in (("full", full), ("partial", partial), ("empty", empty))
    ]
    image = torch.stack(layers).sum(0)
    q_len, kv_len = schedule.seq_lengths
    axis.imshow(
        image.clamp(0, 1).numpy(), extent=(0, kv_len, q_len, 0), interpolation="nearest", aspect="auto"
    )
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    index = f" [{b}, {h}]" if schedule.batch * schedule.heads > 1 else ""
    axis.set_title(
        f"{name_of(schedule.mask_mod)}{index}: {q_len} x {kv_len}, tiles of "
        f"{schedule.BLOCK_SIZE[0]} x {schedule.BLOCK_SIZE[1]}, sparsity {schedule.sparsity():.2f}%",
        fontsize=9,
    )
    handles = [Patch(facecolor=c, edgecolor="#999999", label=name) for name, c in colours.items()]
    # Dark on light, whatever the style around: it lies on the picture.
    axis.legend(handles=handles, loc="upper right", fontsize=8, facecolor="white", labelcolor="black")


def _draw_tokens(
    axis: Any, overview: Any, schedule: RunSchedule, b: int, h: int, zoom: tuple[int, int]
) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    tokens, (q_start, kv_start) = tile_tokens(schedule, b, h, zoom)
    height, width = tokens.shape
    axis.imshow(
        tokens.numpy(),
        cmap=ListedColormap([EMPTY_COLOUR, FULL_COLOUR]),
        vmin=0,
        vmax=1,
        extent=(kv_start, kv_start + width, q_start + height, q_start),
        interpolation="nearest",
        aspect="auto",
    )
    axis.set_xlabel("key")
    axis.set_title(f"tile ({zoom[0]}, {zoom[1]}): {int(tokens.sum())} of {tokens.numel()} pairs", fontsize=9)
    overview.add_patch(Rectangle((kv_start, q_start), width, height, fill=False, edgecolor="#c1121f"))


def tile_tokens(
    schedule: RunSchedule, b: int, h: int, tile: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """The mask's values in one tile, and the (query, key) of its corner."""
    for name, index, size in zip(("row", "column"), tile, schedule.extent.tiles, strict=True):
        if not 0 <= index < size:
            raise MaskArgumentError(f"draw_mask: zoom: expected a {name} of 0 to {size - 1}, got {index}.")
    corner = tuple(i * n for i, n in zip(tile, schedule.BLOCK_SIZE, strict=True))
    sizes = [
        min(n, length - c)
        for n, length, c in zip(schedule.BLOCK_SIZE, schedule.seq_lengths, corner, strict=True)
    ]

    def shifted(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return schedule.mask_mod(b_idx + b, h_idx + h, q_idx + corner[0], kv_idx + corner[1])

    mask = create_mask(shifted, 1, 1, sizes[0], sizes[1], schedule.device)[0, 0]
    return mask.cpu(), (corner[0], corner[1])
