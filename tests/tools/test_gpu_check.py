"""What a card is asked the first time, on a CPU: every step runs, and nothing that follows a failure is lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import card
import pytest
import torch

from flex_inductor.tools import cli
from flex_inductor.tools.gpu import cases, compare, measure, table
from flex_inductor.tools.gpu.cases import BACKWARD, CUDNN, FLEX, FORWARD, OURS, Case, Side
from flex_inductor.tools.gpu.measure import Result, Setting
from flex_inductor.tools.rounds import Spread
from flex_inductor.tools.workers import Call, Deadline, Failed, Late, Workers

ROOT = Path(__file__).parents[2]
# As Python starts: importing one of these then fails as if it were not installed.
BARE = """
import sys
sys.modules.update(dict.fromkeys(["pytest", "expecttest", "hypothesis", "rich", "pygments", "matplotlib"]))
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """All parts of the script, by Triton's interpreter, where only torch, triton and what they need is installed."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "sitecustomize.py").write_text(BARE)
    given = [
        "--dry",
        "--rounds",
        "1",
        "--only",
        "causal",
        "--kernel",
        "forward",
        "--calls",
        "1",
        "--out",
        folder / "found",
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", ROOT / "tools/gpu_check.sh", *given],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (
        done.stdout,
        json.loads((folder / "found/report.json").read_text()),
        (folder / "found/report.md").read_text(),
    )


def test_a_dry_run(dry_run):
    shown, found, page = dry_run
    assert shown == page
    assert (
        "not installed, and not needed: pytest, expecttest, hypothesis, rich, pygments, matplotlib" in shown
    )
    assert [line for line in shown.splitlines() if line.startswith("## ")] == [
        "## speed",
        "## compare",
        "## correct",
    ]
    rows = [line.split(" | ")[:2] for line in shown.splitlines() if line.startswith("| causal")]
    assert rows == [["| causal D16 S64", FORWARD], ["| causal D16 S64", BACKWARD]]
    assert (
        "causal D16 S64, torch flex: NotImplementedError: FlexAttention does not support backward on CPU"
        in shown
    )
    timed = {(r["which"], r["side"]) for r in found["results"] if r["ms"] is not None}
    assert {(FORWARD, OURS), (BACKWARD, OURS), (FORWARD, CUDNN)} <= timed
    assert (FORWARD, "forward block_m=16 block_n=32 descriptors=1") in timed
    assert not {r["side"] for r in found["results"] if r["ms"] is None} - {FLEX}
    assert "fastest: " in shown and len(found["right"]) == 1 and "wrong" not in found
    assert shown.endswith("1 calls right, 0 wrong\n")


def brute_pairs(allowed, length):
    return sum(allowed(q, k) for q in range(length) for k in range(length))


def test_pairs_that_masks_leave(monkeypatch):
    monkeypatch.setattr(cases, "WINDOW", 10)
    assert Case("causal", 64, 48).pairs == brute_pairs(lambda q, k: q >= k, 48)
    assert Case("window", 64, 48).pairs == brute_pairs(lambda q, k: 0 <= q - k < 10, 48)
    assert Case("decode", 64, 48).pairs == 48
    same = brute_pairs(lambda q, k: q >= k and q // 6 == k // 6, 48)
    assert Case("documents", 64, 48).pairs == same


def test_work_of_a_case():
    case = Case("causal", 16, 128, 4, 4, batch=2)
    assert case.work(FORWARD) == 2 * 4 * (128 * 129 / 2) * 16 * 2 * 2 / 1e9
    assert case.work(BACKWARD) == 2.5 * case.work(FORWARD)
    decode = Case("decode", 16, 128)
    key = cases.tensors_of(decode, "cpu", torch.bfloat16)[1]
    assert decode.work(FORWARD) == 2 * key.nbytes / 1e6


def test_the_cases_of_the_table():
    """Every variant at every head dim that it is asked for at, the first with an aim."""
    dims = {}
    for case in cases.CASES:
        dims.setdefault(case.variant, set()).add(case.head_dim)
    assert dims["causal"] == dims["documents"] == dims["alibi"] == dims["bias"] == {64, 128, 256}
    assert {64, 128} == dims["window"] == dims["GQA 8:1"] == dims["decode"]
    assert {case.length for case in cases.CASES if case.variant == "causal"} == {2048, 4096, 8192, 16384}
    assert cases.CASES[0].title == "causal D128 S8192" and len(set(cases.CASES[0].aims)) == 4
    assert all(case.aims for case in cases.CASES[:4])


def test_configs_to_compare():
    case = cases.CASES[0]
    plain = [side.configs["forward"] for side in compare.plain_configs("forward", case, "cuda")]
    assert {"block_m": 128, "block_n": 128, "warps": 8, "stages": 3} in plain
    with_axes = [side.name for side in compare.axes_on("forward", [Side(configs={"forward": plain[0]})])]
    assert any(name.endswith("descriptors=1") for name in with_axes)


def test_a_wrong_side_is_not_timed(monkeypatch):
    call = measure._Call(cases.CASES[0].small(), Setting("cpu"))
    right = call.gold[0]
    monkeypatch.setattr(call, "_results", lambda *_: [right * 1.1, *call.gold[1:]])
    monkeypatch.setattr(call, "attend", lambda side: lambda *_: right)
    with pytest.raises(RuntimeError, match=r"wrong: relative error 0\.1, expected below 0\.062"):
        call.check(Side(CUDNN))
    monkeypatch.setattr(call, "_results", lambda *_: [right * float("nan"), *call.gold[1:]])
    with pytest.raises(RuntimeError, match="wrong: relative error nan"):
        call.check(Side(CUDNN))
    with pytest.raises(RuntimeError, match="served by no route, not by triton"):
        call.check(Side())


def test_a_row_without_our_figures():
    case = cases.CASES[0]
    results = [
        Result(case.title, FORWARD, OURS, None, note="crashed"),
        Result(case.title, FORWARD, FLEX, Spread(2.0, 1.9, 2.1), Spread(1.0, 1.0, 1.0), 100.0, 0.5),
    ]
    row = next(table.lines_of(case, results))
    assert row.startswith("| causal D128 S8192 | forward | failed |  |  | 2 (1.9 to 2.1) ms |")


def test_one_call_costs_no_other():
    """A worker that crashes, hangs or raises is replaced."""
    soon, past = Deadline(1), Deadline(-1)
    with Workers(1) as workers:
        first = workers.run(Call(os.getpid, (), 60), soon)
        assert workers.run(Call(os.getpid, (), 60), soon) == first != os.getpid()
        calls = {
            Call(os._exit, (3,), 60): "its process ended with exit code 3",
            Call(int, ("x",), 60): "ValueError: invalid literal for int() with base 10: 'x'",
            Call(os.read, (0, 0, 0), 60): "TypeError: read expected 2 arguments, got 3",
        }
        for call, answer in workers.run_all(calls, soon):
            assert isinstance(answer, Failed) and str(answer) == calls[call]
        with pytest.raises(Failed, match=r"took longer than 0\.1 s"):
            workers.run(Call(time.sleep, (60,), 0.1), soon)
        assert workers.run(Call(os.getpid, (), 60), soon) != first
        with pytest.raises(Late, match="no time left"):
            workers.run(Call(os.getpid, (), 60), past)


def test_calls_on_a_card():
    titles = [call.title for call in card.CALLS]
    assert len(set(titles)) == len(titles)
    assert [call.dtype for call in card.CALLS][-1] == torch.float32
    first = next(i for i, call in enumerate(card.CALLS) if call.dtype == torch.float32)
    assert all(call.dtype == torch.float32 for call in card.CALLS[first:])
    calls = [call for call in card.CALLS if isinstance(call, card.Call)]
    assert {call.mask for call in calls} == {*card.MASKS} and {call.mod for call in calls} == {*card.MODS}
    lacking = [call.title for call in card.CALLS if card.without(call, (8, 0), 2)]
    assert lacking and all("descriptors" in title for title in lacking)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card(capsys):
    assert cli.main(["bench", "gpu"]) == 2
    wanted = "this machine has no GPU that torch can use; `flex-inductor bench static` needs none\n"
    assert capsys.readouterr().err == wanted


def test_no_such_case(capsys):
    assert cli.main(["bench", "gpu", "--only", "nothing like it"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("no case contains 'nothing like it'; there are\n  causal D128 S8192\n")
    assert cli.main(["bench", "gpu", "--compare", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("no kernel is called 'nothing'; there are forward, backward_dq")


@pytest.mark.slow
def test_calls_in_other_places(tmp_path):
    given = ["--dry", "correct", "--out", tmp_path, "--minutes", "20"]
    environment = os.environ | {"PYTHON": sys.executable}
    script = ["sh", ROOT / "tools/gpu_check.sh", *given]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert {call.title for call in card.CALLS if isinstance(call, card.Place)} <= set(found["right"])
