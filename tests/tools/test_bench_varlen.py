"""Every side of the table is called, checked and timed; the numbers mean nothing here."""

import json

import pytest
import torch

from flex_inductor.tools import bench_varlen, cli
from flex_inductor.tools.bench_varlen import PACKED, PADDED, SDPA, WHOLE, Case, Side


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_a_run(tmp_path, capsys, monkeypatch):
    cases = (
        Case("few", (3, 9, 1), head_dim=8),
        Case("few", (3, 9, 1), (2, 4), heads=4, kv_heads=2, head_dim=8),
    )
    monkeypatch.setattr(bench_varlen, "CASES", cases)
    file = tmp_path / "found.json"
    assert cli.main(["bench", "varlen", "--rounds", "2", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert [r["side"] for r in results] == [PACKED, PADDED, SDPA, "pages of 2", "pages of 4", WHOLE, SDPA]
    assert [round(r["pairs"], 3) for r in results[:3]] == [1, 2.67, 2.67]
    assert all(0 < r["ms"]["low"] <= r["ms"]["median"] <= r["ms"]["high"] for r in results)
    assert "over the first" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["training", "decoding"])
def test_a_side_that_is_wrong_is_not_timed(which, monkeypatch):
    make = getattr(bench_varlen, which)

    def one_off(case):
        sides, gold = make(case)
        first = next(iter(sides))
        right = sides[first]
        wrong = Side(lambda: [*right.step()[:-1], right.step()[-1] * 1.01], right.of_longest, right.pairs)
        return {**sides, first: wrong}, gold

    monkeypatch.setattr(bench_varlen, which, one_off)
    pages = (2,) if which == "decoding" else ()
    with pytest.raises(RuntimeError, match="is wrong"):
        bench_varlen.measure(Case("few", (3, 9, 1), pages, head_dim=8), 1)
