"""What sphinx-gallery makes of the scripts: their order, and pictures for furo's light mode and its dark one."""

from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex

READING = (
    "first_mod",
    "learnable_bias",
    "pack_documents",
    "long_context",
    "serve_with_pages",
    "read_your_kernel",
)
INK, DARK_INK = "#24292f", "#cfd0d0"
WIDTH = 640  # CSS pixels of a figure that is 6.4 inches wide

STYLE = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=["#3d85b8", "#e08f2c", "#4f9d69", "#c25757", "#8a6fb5"]),
    "legend.frameon": False,
    "savefig.bbox": "tight",
}


class Order:
    """Tutorials in the order in which one reads them, then all others by name."""

    def __init__(self, folder):
        pass

    def __call__(self, file):
        name = Path(file).stem
        return READING.index(name) if name in READING else len(READING), name


def prepare(gallery_conf, fname):
    """Before each script: one look for all, and nothing left of the script before it in this process."""
    matplotlib.rcParams.update(STYLE)
    torch._dynamo.reset()
    torch.set_num_threads(1)  # scripts run side by side


def scrape(block, block_vars, gallery_conf):
    """The figures that a block left open, as two images each. A figure that sets its own paper is saved once."""
    made = []
    for number, path in zip(pyplot.get_fignums(), block_vars["image_path_iterator"], strict=False):
        figure, path = pyplot.figure(number), Path(path)
        own_paper = to_hex(figure.get_facecolor()) != to_hex(matplotlib.rcParams["figure.facecolor"])
        figure.savefig(path, dpi=200, facecolor=figure.get_facecolor())
        made.append(image(path, figure, gallery_conf, "" if own_paper else "only-light"))
        if not own_paper:
            dark = path.with_stem(f"{path.stem}_dark")
            to_dark(figure)
            figure.savefig(dark, dpi=200, transparent=True)
            made.append(image(dark, figure, gallery_conf, "only-dark"))
    pyplot.close("all")
    return "\n".join(made)


def to_dark(figure):
    """Gives everything that has the ink's colour the dark mode's, but a legend's words on a picture."""
    on_pictures = [axes.get_legend() for axes in figure.axes if axes.images and axes.get_legend()]
    kept = {id(artist) for legend in on_pictures for artist in legend.findobj()}
    for artist in figure.findobj(lambda artist: id(artist) not in kept):
        for name in ("color", "edgecolor", "facecolor"):
            colour = getattr(artist, f"get_{name}", lambda: None)()
            if matplotlib.colors.is_color_like(colour) and to_hex(colour) == INK:
                getattr(artist, f"set_{name}")(DARK_INK)
    for axes in figure.axes:
        axes.tick_params(which="both", colors=DARK_INK)


def image(path, figure, gallery_conf, only):
    words = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    alt = " ".join("; ".join(filter(None, words)).split())
    if not alt:
        raise ValueError(
            f"{path.name}: expected a figure with a title, got none. Its alt text is made of it."
        )
    place = path.relative_to(gallery_conf["src_dir"]).as_posix()
    width = round(WIDTH * figure.get_figwidth() / 6.4)
    return f".. image:: /{place}\n   :alt: {alt}\n   :class: {only}\n   :width: {width}px\n"
