"""`flex-inductor bench masks`: what it prints, writes and draws."""

import json
from dataclasses import replace

import pytest
import torch

from flex_inductor.tools import bench_masks, cli


@pytest.fixture
def small_cases(monkeypatch):
    """Short masks in this process: the numbers mean nothing, the way to them is the same."""
    causal = next(case for case in bench_masks.CASES if case.name == "causal")
    short = replace(causal, length=300)
    monkeypatch.setattr(bench_masks, "CASES", (short, replace(short, name="runs", compact=True)))
    monkeypatch.setattr(bench_masks, "OwnProcess", bench_masks.Side)
    monkeypatch.setattr(bench_masks, "ROUNDS", 2)


def test_table_and_json(small_cases, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # it takes half a minute
    assert cli.main(["bench", "masks", "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    sides = [(result["case"], result["side"]) for result in results]
    assert sides[:3] == [("causal", side) for side in bench_masks.SIDES] and ("runs", "ours") in sides
    for ms in (result["ms"] for result in results):
        assert 0 < ms["low"] <= ms["median"] <= ms["high"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "case",
        *(c for c, _ in sides),
    ]


def test_json_alone_on_standard_output(small_cases, capsys):
    cli.main(["bench", "masks", "--no-torch", "--only", "runs", "--json", "-"])
    assert [result["case"] for result in json.loads(capsys.readouterr().out)] == ["runs"]


def test_plot(small_cases, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_masks, "PLOT_LENGTHS", (256, 512))
    cli.main(["bench", "masks", "--no-torch", "--only", "runs", "--plot", str(tmp_path / "cost.svg")])
    assert (tmp_path / "cost.svg").read_text().count("<path") > 10


def test_plot_without_matplotlib_fails_before_anything_is_measured(small_cases, monkeypatch, capsys):
    monkeypatch.setattr(bench_masks, "find_spec", lambda name: None)
    assert cli.main(["bench", "masks", "--plot", "cost.svg"]) == 2
    assert capsys.readouterr() == ("", "--plot needs matplotlib: pip install 'flex-inductor[draw]'\n")


def test_unknown_case(capsys):
    assert cli.main(["bench", "masks", "--only", "nothing like it"]) == 2
    assert "no case contains 'nothing like it'" in capsys.readouterr().err
