"""`flex-inductor bench distributed`: every side is called and compared; the numbers mean nothing here."""

import json
from argparse import Namespace

from flex_inductor.tools import cli, distributed_methods
from flex_inductor.tools.distributed_methods import CASES, METHODS, TORCH, Result
from flex_inductor.tools.rounds import Spread

LENGTH = 512
(BIASED,) = (case for case in CASES if case.bias)


def measured(group, gold):
    distributed_methods._torchs = unable  # it compiles for half a minute
    return distributed_methods._measured(BIASED, gold, Namespace(length=LENGTH, rounds=2, eager=True))


def unable(*_):
    raise RuntimeError("not today\nat all")


def test_the_sides(group):
    for found in group.run(measured, distributed_methods._gold(BIASED, LENGTH), ranks=2):
        assert found.pop(TORCH) == "does not run: not today"
        assert tuple(found) == METHODS
        for forward, both, sent, error in found.values():
            assert len(forward) == len(both) == 2 and min(*forward, *both) > 0
            assert max(sent) > 0 and 0 < error < 1e-5


def test_a_wrong_side_has_its_error(group):
    gold = [tensor * 1.5 for tensor in distributed_methods._gold(BIASED, LENGTH)]
    for found in group.run(measured, gold, ranks=2):
        assert all(abs(found[method][3] - 1 / 3) < 1e-4 for method in METHODS)


def test_the_command(tmp_path, capsys, monkeypatch):
    def measure(cases, arguments):
        assert cases == [BIASED] and arguments.ranks == 4
        spread = Spread(2.0, 1.0, 3.0)
        return [
            Result(BIASED.name, "cast", spread, spread, (2048, 0), 1e-6),
            Result(BIASED.name, TORCH, note="does not run: not today"),
        ]

    monkeypatch.setattr(distributed_methods, "measure", measure)
    file = tmp_path / "found.json"
    assert cli.main(["bench", "distributed", "--only", "bias", "--json", str(file)]) == 0
    first, second = json.loads(file.read_text())["results"]
    assert first["forward"] == {"median": 2.0, "low": 1.0, "high": 3.0} and first["sent"] == [2048, 0]
    assert second["error"] is None and second["note"] == "does not run: not today"
    shown = capsys.readouterr().out
    assert "2 KiB" in shown and "1.0e-06" in shown
    assert cli.main(["bench", "distributed", "--only", "nothing"]) == 2
