"""The drawings of the concepts page: SVG inside the page, in its colours, by `{drawing} name`.

Names and numbers come from the package, so that a drawing cannot say what the code no longer does.
"""

from html import escape

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from flex_inductor import create_block_mask, masks

WIDTH = 480  # narrow, so that a phone shows it in full


class Drawing:
    """Shapes one after the other; `svg` puts them together."""

    def __init__(self, height, says):
        self.height, self.says, self.parts = height, says, []

    def rect(self, x, y, width, height, style="box", corner=4):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{corner}" class="{style}"/>'
        )

    def text(self, x, y, words, style="", anchor="middle"):
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>'
        )

    def box(self, x, y, width, words, style="box"):
        """A box with a line for each of the words; where its bottom is."""
        height = 10 + 18 * len(words)
        self.rect(x, y, width, height, style)
        for n, line in enumerate(words):
            self.text(x + width / 2, y + 19 + 18 * n, line, "strong" if n == 0 and len(words) > 1 else "")
        return y + height

    def arrow(self, *points, style="line"):
        path = " L ".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path d="M {path}" class="{style}" marker-end="url(#tip)"/>')

    @property
    def svg(self):
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" class="tip"/></marker></defs>'
        )
        return (
            f'<svg class="drawing" role="img" aria-label="{escape(self.says)}" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}">{tip}{"".join(self.parts)}</svg>'
        )


def runs_of(tiles):
    """Neighbouring tiles as text: 0 to 2, 5."""
    runs = []
    for tile in sorted(tiles):
        if runs and tile == runs[-1][1] + 1:
            runs[-1][1] = tile
        else:
            runs.append([tile, tile])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def schedule():
    size, side, top = 8, 28, 40
    mask = create_block_mask(
        masks.document(lengths=[80, 176, 256]), None, None, 512, 512, device="cpu", BLOCK_SIZE=64
    )
    made = Drawing(
        top + size * side + 40,
        "Tiles of a mask of three documents: full, partial and empty ones, and each row's runs.",
    )
    made.text(120, 26, "tiles of keys")
    made.text(WIDTH - 100, 26, "what the kernel reads")
    for row in range(size):
        partial = set(mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist())
        full = set(mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist())
        y = top + row * side
        for column in range(size):
            style = "full" if column in full else "partial" if column in partial else "empty"
            made.rect(8 + column * side, y, side - 3, side - 3, style, 2)
        words = f"full {runs_of(full)}; " if full else ""
        made.text(250, y + 17, f"{words}partial {runs_of(partial)}", anchor="start")
    for n, style in enumerate(("full", "partial", "empty")):
        made.rect(8 + n * 90, top + size * side + 10, 16, 16, style, 2)
        made.text(30 + n * 90, top + size * side + 23, style, anchor="start")
    return made


def joint():
    made = Drawing(
        280, "Forward and backward of one tile, with score_mod in one and the joint graph in the other."
    )
    made.text(110, 22, "forward", "strong")
    made.text(360, 22, "backward", "strong")
    forward = [
        ["q · k"],
        ["score_mod", "(score, b, h, q_idx, kv_idx)"],
        ["softmax, weights · v"],
        ["out, logsumexp"],
    ]
    backward = [
        ["q · k again, grad out · v"],
        ["weights, from logsumexp"],
        ["joint graph", "(score, ..., grad)"],
    ]
    bottoms = []
    for x, boxes in ((8, forward), (262, backward)):
        y = 36
        for n, words in enumerate(boxes):
            style = "accent" if len(words) > 1 else "box"
            bottom = made.box(x, y, 210, words, style)
            if n + 1 < len(boxes):
                made.arrow((x + 105, bottom), (x + 105, bottom + 22))
            bottoms.append(bottom)
            y = bottom + 24
    last = bottoms[-1]
    made.arrow((310, last), (310, last + 24))
    made.arrow((424, last), (424, last + 24))
    made.box(262, last + 26, 98, ["d score", "for dq, dk"])
    made.box(374, last + 26, 98, ["d captures", "added up"])
    made.arrow((218, bottoms[3] - 14), (240, bottoms[3] - 14), (240, 104), (260, 104), style="line dashed")
    return made


def routes():
    from flex_inductor.lowerings.registry import ROUTES  # imports Inductor, which takes seconds

    made = Drawing(
        60 + 74 * len(ROUTES), "A call is offered to each route in turn; the first that can use it serves."
    )
    made.box(8, 10, 150, ["one call"])
    asked = {
        "triton": "on a GPU, mods that inline",
        "cpu": "on a CPU, mods that inline",
        "chunked": "every call, in bounded memory",
    }
    for n, route in enumerate(ROUTES):
        y = 60 + 74 * n
        made.arrow((83, y - (28 if n else 22)), (83, y - 2))
        bottom = made.box(8, y, 150, [route.name, "can it?"], "accent")
        made.arrow((158, y + 23), (206, y + 23))
        made.text(180, y + 16, "yes")
        made.text(214, y + 20, asked[route.name], anchor="start")
        made.text(214, y + 38, "serves: the decision has its config", "quiet", "start")
        if n + 1 < len(ROUTES):
            made.text(96, bottom + 17, "no: the decision has the reason", "quiet", "start")
    return made


def ring():
    ranks, top, side = 4, 56, 96
    made = Drawing(
        top + ranks * 46 + 66,
        "A ring of four ranks in four steps: each computes with a block, then passes it on.",
    )
    for step in range(ranks):
        made.text(76 + side * step + 44, 22, f"step {step}", "strong")
        made.text(76 + side * step + 44, 42, "own keys" if step == 0 else "received", "quiet")
    for rank in range(ranks):
        y = top + 46 * rank
        made.text(8, y + 22, f"rank {rank}", "strong", "start")
        for step in range(ranks):
            block = (rank - step) % ranks
            made.rect(76 + side * step, y, 80, 32, f"rank{block}")
            made.text(76 + side * step + 40, y + 21, f"K{block} V{block}", "on")
            if step + 1 < ranks and rank + 1 < ranks:
                x = 76 + side * step + 80
                made.arrow((x, y + 24), (x + 14, y + 52))
    y = top + ranks * 46 + 16
    made.text(8, y, "Each rank sends its block on while it computes with it; rank 3 sends", "", "start")
    made.text(8, y + 20, "to rank 0. The backward goes the same way, and d(K), d(V) travel too.", "", "start")
    return made


DRAWINGS = {made.__name__: made for made in (schedule, joint, routes, ring)}


class DrawingDirective(SphinxDirective):
    required_arguments = 1

    def run(self):
        return [nodes.raw("", f"<figure>{DRAWINGS[self.arguments[0]]().svg}</figure>", format="html")]


def setup(app):
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True}
