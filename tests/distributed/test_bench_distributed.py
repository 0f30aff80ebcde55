"""`flex-inductor bench distributed`: every side is called and compared; the numbers mean nothing here."""

import json

from flex_inductor.tools import cli
from flex_inductor.tools.bench import distributed
from flex_inductor.tools.bench.distributed import CASES, METHODS, TORCH

LENGTH = 512
(BIASED,) = (case for case in CASES if case.bias)


def measured(group, gold):
    distributed._torchs = unable  # it compiles for half a minute
    return distributed.measured(BIASED, gold, LENGTH, rounds=2, eager=True)


def unable(*_):
    raise RuntimeError("not today\nat all")


def test_the_sides(group):
    for found in group.run(measured, BIASED.gold(LENGTH), ranks=2):
        assert found.pop(TORCH) == "does not run: not today"
        assert tuple(found) == METHODS
        for forward, both, sent, error in found.values():
            assert len(forward) == len(both) == 2 and min(*forward, *both) > 0
            assert max(sent) > 0 and 0 < error < 1e-5


def test_a_wrong_side_has_its_error(group):
    for found in group.run(measured, [tensor * 1.5 for tensor in BIASED.gold(LENGTH)], ranks=2):
        assert all(abs(found[method][3] - 1 / 3) < 1e-4 for method in METHODS)


def test_the_command(tmp_path, capsys, monkeypatch):
    def measure(case, arguments):
        assert case is BIASED and (arguments.ranks, arguments.length, arguments.rounds) == (4, 8192, 5)
        mib, not_today = 2**20, "does not run: not today"
        first = {
            "cast": ([1.0, 4.0], [5.0, 7.0], (mib, 0), 1e-6),
            "all_gather": ([1.0, 1.0], None, (0, 0), 0.0),
        }
        second = {
            "cast": ([3.0, 2.0], [6.0, 1.0], (0, 3 * mib), 2e-6),
            "all_gather": ([2.0, 2.0], None, (0, 0), 0.0),
        }
        return distributed.together(case.title, [{**rank, TORCH: not_today} for rank in (first, second)])

    monkeypatch.setattr(distributed, "measure", measure)
    file = tmp_path / "found.json"
    assert cli.main(["bench", "distributed", "--only", "bias", "--json", str(file)]) == 0
    cast, gather, torchs = json.loads(file.read_text())["results"]
    assert cast["ms"] == {"median": 3.5, "low": 3.25, "high": 3.75}  # of the slowest rank in each round
    facts = {name: cast["facts"][name] for name in ("sent_mib", "sent_mib_backward", "error")}
    assert facts == {"sent_mib": 1, "sent_mib_backward": 3, "error": 2e-6}
    assert cast["facts"]["both"]["median"] == 6.5 and gather["facts"]["both"] == "none on the CPU"
    assert torchs["ms"] is None and torchs["note"] == "does not run: not today"
    assert "2e-06" in capsys.readouterr().out
