"""What the table for CPUs is made of: every side is called, checked and timed; the numbers mean nothing here."""

import json

import pytest
import torch

from flex_inductor.tools import bench_cpu, cli
from flex_inductor.tools.bench_cpu import DENSE, FLEX, MASKED, OURS, SDPA, Case, _causal


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        bench_cpu, "CASES", (Case("causal", 128, _causal, heads=2, kv_heads=1, backward=True),)
    )
    file = tmp_path / "found.json"
    assert cli.main(["bench", "cpu", "--rounds", "2", "--json", str(file)]) == 0
    results = {r["side"]: r for r in json.loads(file.read_text())["results"]}
    assert list(results) == [OURS, SDPA, MASKED, DENSE, FLEX]
    assert results[FLEX]["ms"] is None and "FlexAttention does not support backward" in results[FLEX]["note"]
    assert results[OURS]["ratio"] == {"median": 1, "low": 1, "high": 1}
    for side in (OURS, SDPA, MASKED, DENSE):
        ms = results[side]["ms"]
        assert 0 < ms["low"] <= ms["median"] <= ms["high"]
    assert "over ours" in capsys.readouterr().out


def test_a_side_that_is_wrong_is_not_timed(monkeypatch):
    sides = bench_cpu._sides

    def one_off(*arguments):
        found = sides(*arguments)
        return {OURS: found[OURS], DENSE: lambda *qkv: found[DENSE](*qkv) * 1.01}

    monkeypatch.setattr(bench_cpu, "_sides", one_off)
    ours, wrong = bench_cpu.measure(Case("causal", 64, _causal), 1)
    assert ours.ms and wrong.ms is None and wrong.note.startswith("RuntimeError: dense eager is wrong")
