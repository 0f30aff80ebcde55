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
from flex_inductor.tools.bench import gpu, gpu_calls
from flex_inductor.tools.bench.call import Made, documents
from flex_inductor.tools.bench.gpu_calls import BACKWARD, CASES, CUDNN, FLEX, FORWARD, Case, Setting, Side
from flex_inductor.tools.bench.harness import OURS
from flex_inductor.tools.bench.workers import Deadline, Failed, Job, Late, Worker, run_all

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
    asked = "--dry --rounds 1 --minutes 30 --only causal --kernel forward --calls 1"
    given = [*asked.split(), "--out", folder / "found"]
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
    rows = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| causal")]
    assert rows == ["causal D16 S64 forward", "causal D16 S64 backward"]
    assert f"| {FLEX}      | NotImplementedError: FlexAttention does not support backward on CPU" in shown
    timed = {(r["case"].split()[-1], r["side"]) for r in found["results"] if r["ms"] is not None}
    assert {(FORWARD, OURS), (BACKWARD, OURS), (FORWARD, CUDNN)} <= timed
    assert (FORWARD, "forward block_m=16 block_n=32 descriptors=1") in timed
    assert not {r["side"] for r in found["results"] if r["ms"] is None} - {FLEX}
    assert "fastest: " in shown and len(found["right"]) == 1 and "wrong" not in found
    assert shown.endswith("1 calls right, 0 wrong\n")


def test_pairs_that_masks_leave(monkeypatch):
    monkeypatch.setattr(gpu_calls, "WINDOW", 10)
    rows, columns = torch.arange(48)[:, None], torch.arange(48)
    document = documents(48)
    kept = {
        "causal": rows >= columns,
        "window": (rows >= columns) & (rows - columns < 10),
        "decode": rows[:1] >= columns * 0,
        "documents": (rows >= columns) & (document[:, None] == document),
    }
    for variant, pairs in kept.items():
        assert Case(variant, 48).pairs == pairs.sum()


def test_work_of_a_case():
    case = Case("causal", 128, 16, 4, 4, batch=2)
    assert case.work(FORWARD) == 2 * 4 * (128 * 129 / 2) * 16 * 2 * 2 / 1e9
    assert case.work(BACKWARD) == 2.5 * case.work(FORWARD)
    decode = Case("decode", 128, 16, backward=False)
    assert decode.work(FORWARD) == 2 * Made(decode).inputs[1].nbytes / 1e6


def test_the_cases_of_the_table():
    """Every variant at every head dim that it is asked for at, the first with an aim."""
    dims = {}
    for case in CASES:
        dims.setdefault(case.variant, set()).add(case.head_dim)
    assert dims["causal"] == dims["documents"] == dims["alibi"] == dims["bias"] == {64, 128, 256}
    assert {64, 128} == dims["window"] == dims["GQA 8:1"] == dims["decode"]
    assert {case.length for case in CASES if case.variant == "causal"} == {2048, 4096, 8192, 16384}
    assert CASES[0].title == "causal D128 S8192" and len(set(CASES[0].aims)) == 4
    assert all(case.aims for case in CASES[:4])


def test_configs_to_compare():
    plain = [*gpu.plain_configs("forward", CASES[0], "cuda")]
    first = {"block_m": 128, "block_n": 128, "warps": 8, "stages": 3}
    assert first in [side.configs["forward"] for side in plain]
    with_axes = [side.name for side in gpu.axes_on("forward", plain[:1])]
    assert any(name.endswith("descriptors=1") for name in with_axes)


@pytest.mark.parametrize(
    "side, factor, why",
    [
        (CUDNN, 1.1, r"wrong: relative error 0\.1, expected below 0\.062"),
        (CUDNN, float("nan"), "wrong: relative error nan"),
        (OURS, 1.0, "served by no route, not by triton"),
    ],
)
def test_a_wrong_side_is_not_timed(side, factor, why, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        gpu_calls, "attend_of", lambda *_: lambda *qkv: attention(*qkv, is_causal=True) * factor
    )
    with pytest.raises(RuntimeError, match=why):
        gpu_calls.prepare(CASES[0].small(), Side(side), Setting("cpu"))


def test_a_worker_that_fails_is_replaced():
    """One that crashes, hangs or raises costs no other job."""
    soon, past = Deadline(1), Deadline(-1)
    with Worker() as worker:
        first = worker.run(Job(os.getpid), soon)
        assert worker.run(Job(os.getpid), soon) == first != os.getpid()
        jobs = {
            Job(os._exit, (3,)): "its process ended with exit code 3",
            Job(int, ("x",)): "ValueError: invalid literal for int() with base 10: 'x'",
        }
        for job, answer in run_all([worker], jobs, soon):
            assert isinstance(answer, Failed) and str(answer) == jobs[job]
        with pytest.raises(Failed, match=r"took longer than 0\.1 s"):
            worker.run(Job(time.sleep, (60,), 0.1), soon)
        assert worker.run(Job(os.getpid), soon) != first
        with pytest.raises(Late, match="no time left"):
            worker.run(Job(os.getpid), past)


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
    assert capsys.readouterr().err == f"flex-inductor bench: {wanted}"


def test_no_such_case(capsys):
    assert cli.main(["bench", "gpu", "--only", "nothing like it"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("no case contains 'nothing like it'; there are\n  causal D128 S8192\n")
    with pytest.raises(SystemExit):
        cli.main(["bench", "gpu", "--compare", "nothing"])
    assert "argument --compare: invalid choice: 'nothing' (choose from " in capsys.readouterr().err


@pytest.mark.slow
def test_calls_in_other_places(tmp_path):
    given = ["--dry", "correct", "--out", tmp_path, "--minutes", "20"]
    environment = os.environ | {"PYTHON": sys.executable}
    script = ["sh", ROOT / "tools/gpu_check.sh", *given]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert {call.title for call in card.CALLS if isinstance(call, card.Place)} <= set(found["right"])
