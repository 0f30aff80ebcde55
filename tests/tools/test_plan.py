"""`flex-inductor plan`: what is printed, written and drawn, and what is refused."""

import json
import re

import pytest
import torch

from flex_inductor.distributed.balance import owners
from flex_inductor.distributed.cost import CostModel, estimate
from flex_inductor.distributed.work import TileWork
from flex_inductor.masks import causal, sliding_window
from flex_inductor.tools import cli, plan_picture

SCRIPT = """
from flex_inductor import Sequences, create_block_mask, masks

def both():
    print("made")
    return {"full": masks.causal(), "near": masks.sliding_window(512)}

def made():
    return create_block_mask(masks.causal(), None, None, 2048, 2048, "cpu", 64)

def packed():
    return Sequences.from_lengths([1000, 500, 700])

def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx + 10 * h

def wrong(length):
    return None

def broken():
    raise ValueError("no masks today")
"""


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: several threads only wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(capsys, *words, status=0):
    assert cli.main(["plan", *words]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_the_table(capsys):
    text = run(capsys, "sliding_window", "size=512", "--length", "16384", "--ranks", "4")
    assert text.startswith(
        "sliding_window size=512: 16384 tokens in 128 tiles of 128, 4 ranks; a query's tile reads 4.9"
    )
    assert "A model, not a measurement" in text
    rows = [line.split() for line in text.splitlines()]
    methods = [
        (row[0], row[1]) for row in rows if row and row[0].rstrip("*") in ("cast", "ring", "all_gather")
    ]
    balances = ["contiguous", "head_tail", "documents", "work", "work_and_bytes"]
    assert methods == [
        (method + ("*" if (method, balance) == ("cast", "contiguous") else ""), balance)
        for method in ("cast", "all_gather", "ring")
        for balance in balances
    ]
    (chosen,) = [row for row in rows if row and row[0] == "cast*"]
    work = TileWork.of(sliding_window(512), 16384)
    made = estimate(work, owners("contiguous", work, 4), 4, "cast", CostModel())
    assert chosen[2] == f"{made.imbalance:.3f}" and chosen[3:5] == ["2", "MiB"]
    assert chosen[-2] == f"{100 * made.forward.efficiency_exposed:.0f}-{100 * made.forward.efficiency:.0f}%"
    assert ["0", "4096", "150", "0", "B", "2", "MiB"] in rows
    assert "ring_ulysses         no node of 2 to 8 ranks divides 4 ranks and 128 heads" in text


def test_many_ranks_are_summed_up(capsys):
    text = run(capsys, "causal", "--length", "16384", "--ranks", "32", "--heads", "8", "--kv-heads", "8")
    assert re.search(r"^least +512 .*\n^mean +512 .*\n^most +512 ", text, re.MULTILINE)
    assert "ulysses              8 heads do not divide by 32 ranks" in text
    assert "8 heads, 8 of keys, dimension 128, batch 1" in text


def test_rates_and_memory_decide(capsys):
    words = ("causal", "--length", "16384", "--ranks", "8", "--tflops", "1000", "--gigabytes", "1")
    assert "1000 TFLOP/s and 1 GB/s" in run(capsys, *words)
    short = run(capsys, *words, "--memory", "0.03")
    assert "ring* " in short and "\nring, contiguous: by the model" in short


def test_json(capsys, tmp_path):
    path = tmp_path / "plan.json"
    run(capsys, "document", "lengths=5000,1000,2192", "--ranks", "4", "--length", "8192", "--json", str(path))
    found = json.loads(path.read_text())
    assert found["is"] == "a model, not a measurement"
    assert (found["length"], found["tile"], found["ranks"], found["model"]["heads"]) == (8192, 128, 4, 128)
    assert len(found["owner"]) == 64 and set(found["owner"]) == {0, 1, 2, 3}
    assert sum(found["per_rank"]["tokens"]) == 8192
    assert sum(found["per_rank"]["received"]) == sum(found["per_rank"]["sent"]) > 0
    assert {p["method"] for p in found["plans"]} == {"all_gather", "ring", "cast", "ulysses"}
    assert {"efficiency", "bytes", "hidden", "exposed"} <= set(found["plans"][0]["forward"])
    assert found["method"]["chosen"] in {p["method"] for p in found["plans"]} and found["method"]["rejected"]


def test_random_documents(capsys):
    text = run(capsys, "documents", "mean=2048", "sigma=0.5", "seed=3", "--length", "32768", "--ranks", "4")
    assert text.startswith("documents mean=2048 sigma=0.5 seed=3: 32768 tokens")
    assert run(capsys, "documents", "mean=2048", "--length", "32768") != run(
        capsys, "documents", "mean=2048", "seed=1", "--length", "32768"
    )


@pytest.mark.parametrize(
    "name, options, first",
    [
        ("both", ["--length", "4096", "--weight", "near=30"], "4096 tokens in 32 tiles of 128"),
        ("made", [], "2048 tokens in 32 tiles of 64"),
        ("packed", ["--tile", "100"], "2200 tokens in 22 tiles of 100"),
        ("mask_mod", ["--length", "1000"], "1000 tokens in 8 tiles of 128"),
    ],
)
def test_a_users_masks(name, options, first, script, capsys):
    assert first in run(capsys, f"{script}:{name}", "--ranks", "2", *options)


def test_the_default_length(capsys):
    assert run(capsys, "none", "--tile", "1024").startswith(
        "none: 131072 tokens in 128 tiles of 1024, 8 ranks"
    )


def test_pictures(capsys, tmp_path):
    svg, again, png = (str(tmp_path / name) for name in ("a.svg", "b.svg", "c.png"))
    words = ("causal", "--length", "8192", "--ranks", "4", "--out")
    assert f"written to {svg}" in run(capsys, *words, svg)
    run(capsys, *words, again)
    run(capsys, *words, png)
    text = (tmp_path / "a.svg").read_text()
    assert "causal: 4 ranks, head_tail" in text and "work, max/mean 1.000" in text and "most bytes" in text
    assert text == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_cells_have_the_colour_of_the_rank_that_holds_the_row():
    work = TileWork.of(causal(), 1024)
    owner = owners("head_tail", work, 4)
    colours = plan_picture.rank_colours(4)
    assert len({tuple(colour) for colour in colours.tolist()}) == 4
    cells = plan_picture.image(work, work.masks[0], owner, colours)
    for row in range(8):
        for column in range(8):
            same = torch.equal(cells[row, column], colours[owner[row]])
            assert same == (column <= row)


def test_a_long_mask_mixes_colours():
    work = TileWork.of(causal(), 128 * 2048)
    owner = [tile // 4 % 2 for tile in range(2048)]
    cells = plan_picture.image(
        work, work.masks[0], owner, torch.tensor([[1.0, 0, 0], [0, 0, 1.0]], dtype=torch.float64)
    )
    assert cells.shape == (512, 512, 3)
    assert cells[10, 0].tolist() == [1, 0, 0] and cells[11, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["caausal"], "mask: expected one of causal, sliding_window, "),
        (["none", "a=1"], "got 'none a=1'"),
        (["sliding_window"], "sliding_window: needs size=VALUE."),
        (["documents", "mean=x"], "documents: expected mean=, sigma= or seed= and a number; got 'mean=x'"),
        (["documents", "mode=3"], "got 'mode=3'"),
        (
            ["documents", "mean=0"],
            "documents: expected a mean from 1 and a seed up to 2147483647 and a sigma from 0 to 10",
        ),
        (
            ["documents", "mean=nan"],
            "documents: expected a mean from 1 and a seed up to 2147483647 and a sigma from 0",
        ),
        (
            ["documents", "sigma=1e200"],
            "documents: expected a mean from 1 and a seed up to 2147483647 and a sigma",
        ),
        (["documents", "seed=99999999999999999999999"], "documents: expected a mean from 1 and a seed up to"),
        (["{script}:wrong"], "a function of nothing that returns masks; it takes length"),
        (["{script}:broken"], "broken fails: ValueError: no masks today (train.py:21)"),
        (["{script}:both", "x=1"], "takes no options, got x=1"),
        (
            ["{script}:both", "--weight", "far=2"],
            "--weight: expected NAME=NUMBER with a name of: full, near; got 'far=2'",
        ),
        (["{script}:both", "--weight", "near=much"], "got 'near=much'"),
        (["causal", "--weight", "a=1"], "with a name of: none, as there is one mask without a name"),
        (
            ["{script}:made", "--length", "4096"],
            "mask: expected 4096 queries and keys, one length for all masks",
        ),
        (["{script}:made", "--tile", "100"], "tile: expected a multiple of 64, of all block sizes, got 100"),
        (["causal", "--heads", "12"], "--heads: expected a multiple of --kv-heads, 8, got 12"),
        (["causal", "--ranks", "4097"], "--ranks: expected at most 4096, got 4097"),
        (["causal", "--out", "x.jpeg"], "--out: expected a name ending in .png or .svg, got 'x.jpeg'"),
        (["document", "lengths=10,20"], "captured tensor needs an entry for every index"),
    ],
    ids=" ".join,
)
def test_refused(words, message, script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = run(capsys, *(word.format(script=script) for word in words), status=2)
    (line,) = [line for line in error.splitlines() if line != "made"]  # which the script prints
    assert line.startswith("flex-inductor plan: ") and message in line


@pytest.mark.parametrize("words", ["--tflops 0", "--gigabytes -1", "--memory inf", "--tflops fast"])
def test_rates_are_above_zero(words, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "causal", *words.split()])
    assert f"expected a number above 0, got {words.split()[1]!r}" in capsys.readouterr().err
