"""Drawings: what is drawn as numbers and text, and that the files are pictures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flex_inductor import Sequences
from flex_inductor.errors import FlexTypeError
from flex_inductor.masks import draw, library, load_ipython_extension
from flex_inductor.masks.draw import FULL_COLOUR, draw_mask, tile_shares, tile_tokens
from flex_inductor.masks.errors import MaskArgumentError
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.tools import cli
from flex_inductor.tools import mask as mask_command

matplotlib = pytest.importorskip("matplotlib")


def schedule_of(mask_mod, length=1024, block=128, B=None, H=None):
    return create_block_mask(mask_mod, B, H, length, length, "cpu", block, compact=True)


def test_cells_hold_the_tiles():
    partial, full = tile_shares(schedule_of(library.causal()))
    assert torch.equal(partial, torch.eye(8)) and torch.equal(full, torch.ones(8, 8).tril(-1))


def test_a_long_mask_is_summed_up():
    partial, full = tile_shares(schedule_of(library.causal(), 1 << 20))
    assert partial.shape == full.shape == (512, 512)
    assert full[0, 0].item() == 120 / 256 and partial[0, 0].item() == 16 / 256
    assert full[511, 0].item() == 1 and full[0, 511].item() == 0


def test_batch_and_head_are_chosen():
    schedule = schedule_of(lambda b, h, q, kv: q - kv < 128 * h, H=3, B=2)
    assert tile_shares(schedule, 1, 0)[1].sum() < tile_shares(schedule, 1, 2)[1].sum()


def test_tokens_of_a_tile():
    schedule = schedule_of(library.causal(), 1000)
    tokens, corner = tile_tokens(schedule, 0, 0, (7, 7))
    assert corner == (896, 896) and torch.equal(tokens, torch.ones(104, 104, dtype=torch.bool).tril())
    assert tile_tokens(schedule, 0, 0, (3, 1))[0].all()


def test_svg_says_what_it_shows_and_is_reproducible(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_mask(library.sliding_window(300), tmp_path / name, Q_LEN=1024, KV_LEN=1024, zoom=(3, 1))
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text and FULL_COLOUR in text
    assert "sparsity 59.38%" in text and "tile (3, 1):" in text
    assert (tmp_path / "b.svg").read_text() == text


def test_png_and_block_masks(tmp_path):
    block_mask = create_block_mask(library.causal(), None, None, 512, 512, "cpu")
    draw_mask(block_mask, tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_the_users_backend_stays(tmp_path):
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    draw_mask(library.causal(), tmp_path / "mask.png", Q_LEN=256, KV_LEN=256)
    figure = draw_mask(library.causal(), Q_LEN=256, KV_LEN=256)
    assert matplotlib.get_backend() == "svg"
    assert matplotlib.pyplot.figure(figure.number) is figure, "pyplot would not show it"
    matplotlib.pyplot.close(figure)
    matplotlib.use(before)


def test_figure_without_a_path():
    figure = draw_mask(schedule_of(library.causal(), 512))
    image = figure.axes[0].images[0].get_array()
    assert tuple(image.shape) == (4, 4, 3)
    assert [round(float(x) * 255) for x in image[3, 0]] == [0x2F, 0x66, 0x90]
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"path": "mask.jpeg"}, r"path: expected a name ending in .png or .svg, got 'mask.jpeg'"),
        ({"b": 1}, "draw_mask: b: expected 0 to 0, got 1"),
        ({"zoom": (8, 0)}, "zoom: expected a row of 0 to 7, got 8"),
    ],
    ids=str,
)
def test_refused(kwargs, message):
    with pytest.raises(MaskArgumentError, match=message):
        draw_mask(schedule_of(library.causal()), **kwargs)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_draw(queries, keys, compact):
    mask = create_block_mask(library.causal(), None, None, queries, keys, "cpu", compact=compact)
    with pytest.raises(MaskArgumentError, match=f"expected queries and keys to draw, got {queries} x {keys}"):
        draw_mask(mask)
    assert f"shape=(1, 1, {queries}, {keys})" in draw.to_html(mask)


def test_a_function_needs_lengths():
    with pytest.raises(MaskArgumentError, match="also needs Q_LEN and KV_LEN"):
        draw_mask(library.causal())


@pytest.mark.parametrize(
    ("mask", "kind"), [(3, "an int"), (Sequences.from_lengths([3]).mask(), "a SequenceMask")]
)
def test_what_is_no_mask_is_named(mask, kind):
    with pytest.raises(FlexTypeError, match=f"expected a mask_mod, a BlockMask or a RunSchedule, got {kind}"):
        draw_mask(mask)


def command(*words: str) -> int:
    return cli.main(["mask", *words])


def test_command_prints_text(capsys):
    assert command("sliding_window", "size=128", "--length", "512") == 0
    assert capsys.readouterr().out == (
        "RunSchedule(shape=(1, 1, 512, 512), BLOCK_SIZE=(128, 128), sparsity=56.25%, runs: "
        "kv=4, full_kv=0, q=4, full_q=0)\n"
        "▒▒      \n"
        "▒▒▒▒    \n"
        "  ▒▒▒▒  \n"
        "    ▒▒▒▒\n"
    )


def test_command_knows_the_whole_library():
    functions = vars(library).values()
    masks = {f.__name__ for f in functions if getattr(f, "__annotations__", {}).get("return") == "MaskMod"}
    assert masks == set(mask_command.CONSTRUCTORS)


def test_command_takes_lists_and_draws(capsys, tmp_path):
    out = str(tmp_path / "grid.svg")
    words = ("neighborhood", "shape=32,32", "window=5", "tile=8,8", "--length", "1024", "--block", "64", "64")
    assert command(*words, "--out", out, "--zoom", "0", "1") == 0
    assert f"written to {out}" in capsys.readouterr().out
    assert command("document", "lengths=100,412", "--length", "512") == 0
    assert command("document", "cu_seqlens=0,100,512", "causal=false", "--length", "512") == 0
    assert command("ragged", "q_lengths=300", "kv_lengths=400", "--length", "512") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sliding_window"], "sliding_window: needs size=VALUE."),
        (["causal", "size=3"], "causal: takes no options, got size=3. Leave them out."),
        (["causal", "--zoom", "0", "0"], "--zoom: expected --out with it, the file of the drawing"),
        (["sliding_window", "width=3"], "expected key=value with a key of size, causal; got 'width=3'"),
        (
            ["sliding_window", "size=x"],
            "size: expected an integer, integers with commas, true or false; got 'x'",
        ),
    ],
)
def test_command_says_what_is_wrong(words, message, capsys):
    assert command(*words) == 2
    assert message in capsys.readouterr().err


def test_notebooks_show_the_drawing():
    open_before = matplotlib.pyplot.get_fignums()
    html = create_block_mask(library.causal(), None, None, 640, 640, "cpu", 64, compact=True)._repr_html_()
    assert html.startswith("<svg") and "sparsity 45.00%" in html
    assert matplotlib.pyplot.get_fignums() == open_before, "the figure would be shown a second time"


def test_notebooks_learn_to_draw_torchs_block_masks():
    shown = {}
    html = SimpleNamespace(for_type=shown.__setitem__)
    load_ipython_extension(SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": html})))
    block_mask = create_block_mask(library.causal(), None, None, 640, 640, "cpu", 64)
    assert "sparsity 45.00%" in shown[type(block_mask)](block_mask)


def test_notebooks_without_matplotlib_show_text(monkeypatch):
    monkeypatch.setattr(draw, "find_spec", lambda name: None)
    schedule = create_block_mask(library.causal(), None, None, 640, 640, "cpu", 64, compact=True)
    assert str(schedule) in schedule._repr_html_()
