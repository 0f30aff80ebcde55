"""What the table for cards is made of, on a CPU: no card is needed to see that every side is called and checked."""

import json

import pytest
import torch
from torch import nn

from flex_inductor.tools import bench_gpu, cli
from flex_inductor.tools.bench_gpu import BACKWARD, FORWARD, Case

CASES = (Case("bias", 16, 128, 4, 4, {(BACKWARD, "torch flex"): 3}), Case("decode", 16, 256, 4, 2))


def brute_pairs(allowed, length):
    return sum(allowed(q, k) for q in range(length) for k in range(length))


def test_pairs_that_masks_leave(monkeypatch):
    monkeypatch.setattr(bench_gpu, "WINDOW", 10)
    assert Case("causal", 64, 48).pairs == brute_pairs(lambda q, k: q >= k, 48)
    assert Case("window", 64, 48).pairs == brute_pairs(lambda q, k: 0 <= q - k < 10, 48)
    assert Case("decode", 64, 48).pairs == 48
    same = brute_pairs(lambda q, k: q >= k and q // 6 == k // 6, 48)
    assert Case("documents", 64, 48).pairs == same


def test_work_of_a_case():
    query, key = torch.empty(2, 4, 128, 16), torch.empty(2, 4, 128, 16)
    case = Case("causal", 16, 128, 4, 4)
    assert bench_gpu._work(case, query, key, FORWARD) == 2 * 4 * (128 * 129 / 2) * 16 * 2 * 2 / 1e9
    assert bench_gpu._work(case, query, key, BACKWARD) == 2.5 * bench_gpu._work(case, query, key, FORWARD)
    assert bench_gpu._work(Case("decode", 16, 128), query, key, FORWARD) == 2 * key.nbytes / 1e6


def test_the_cases_of_the_table():
    """Every variant at every head dim that it is asked for at, the first with an aim."""
    dims = {}
    for case in bench_gpu.CASES:
        dims.setdefault(case.variant, set()).add(case.head_dim)
    assert dims["causal"] == dims["documents"] == dims["alibi"] == dims["bias"] == {64, 128, 256}
    assert {64, 128} == dims["window"] == dims["GQA 8:1"] == dims["decode"]
    assert {case.length for case in bench_gpu.CASES if case.variant == "causal"} == {2048, 4096, 8192, 16384}
    assert all(case.aims for case in bench_gpu.CASES[:4]) and len(set(bench_gpu.CASES[0].aims)) == 4


def table(tmp_path, capsys, *arguments):
    file = tmp_path / "found.json"
    given = ["bench", "gpu", "--device", "cpu", "--rounds", "2", "--json", str(file), *arguments]
    status = cli.main(given)
    return status, capsys.readouterr().out, json.loads(file.read_text())


def test_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "CASES", CASES)
    monkeypatch.setattr(bench_gpu, "TOKENS", 256)
    status, shown, found = table(tmp_path, capsys)
    rows = [line for line in shown.splitlines() if line.startswith("| bias") or line.startswith("| decode")]
    assert not status and [row.split(" | ")[1] for row in rows] == [FORWARD, BACKWARD, FORWARD]
    assert rows[1].endswith(" torch flex 3 |") and "GB/s" in rows[2]
    assert (
        "bias D16 S128, torch flex: NotImplementedError: FlexAttention does not support backward on CPU"
        in shown
    )
    sides = {(r["case"], r["side"]): r["ratio"] for r in found["results"]}
    assert sides["bias D16 S128", "torch flex"] is None
    assert sides["decode D16 S256", "ours"] == {"median": 1, "low": 1, "high": 1}
    ratio = sides["decode D16 S256", "SDPA flash"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card(capsys):
    assert cli.main(["bench", "gpu"]) == 2
    wanted = "this machine has no GPU that torch can use; `flex-inductor bench static` needs none\n"
    assert capsys.readouterr().err == wanted


def test_no_such_case(capsys):
    assert cli.main(["bench", "gpu", "--only", "nothing like it"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("no case contains 'nothing like it'; there are\n  causal D128 S8192\n")


def test_no_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "CASES", CASES)
    _, shown, found = table(tmp_path, capsys, "--minutes", "0")
    assert "No time left for: bias D16 S128, decode D16 S256" in shown and found["results"] == []


def test_a_wrong_side_is_not_timed():
    gold = [torch.ones(4)]
    bench_gpu._check("ours", [torch.ones(4, dtype=torch.bfloat16)], gold)
    with pytest.raises(RuntimeError, match=r"ours is wrong: relative error 0\.1, expected below 0\.062"):
        bench_gpu._check("ours", [nn.functional.pad(torch.ones(3), (0, 1), value=1.1)], gold)
    with pytest.raises(RuntimeError, match="wrong"):
        bench_gpu._check("ours", [torch.full((4,), float("nan"))], gold)
