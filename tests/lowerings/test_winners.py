"""Tuning results outlive the process that made them, and a bad file is no reason to fail."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from flex_inductor import fingerprint
from flex_inductor.lowerings import winners
from flex_inductor.tools import cli

FAST, SLOW = {"block_m": 64, "warps": 4}, {"block_m": 128, "warps": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def winner(problem="forward float32 H8:8", **changes):
    made = winners.Winner(problem, "cpu AVX2", fingerprint.FINGERPRINT, FAST, [[FAST, 1.5], [SLOW, 2.5]])
    return made._replace(**changes)


def test_found_by_problem_device_and_build():
    winners.keep(winner())
    assert winners.find("forward float32 H8:8", "cpu AVX2") == winner()
    assert winners.find("forward float32 H8:2", "cpu AVX2") is None
    assert winners.find("forward float32 H8:8", "cpu AVX512") is None
    winners.keep(winner("backward", build="0.0.1+other"))
    assert winners.find("backward", "cpu AVX2") is None


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"config": 3}', json.dumps(winner(config={"block_m": "64"})._asdict())]
)
def test_a_corrupt_file_is_ignored_with_a_warning(content):
    winners.keep(winner())
    (path,) = winners.folder().glob("*.json")
    path.write_text(content)
    with pytest.warns(UserWarning, match="is not a tuning result and is ignored"):
        assert winners.find("forward float32 H8:8", "cpu AVX2") is None
    winners.keep(winner())
    assert winners.find("forward float32 H8:8", "cpu AVX2") == winner()


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "flex_inductor").write_text("a file")
    with pytest.warns(UserWarning, match="the tuning result cannot be kept"):
        winners.keep(winner())


def test_many_writers_leave_one_whole_file():
    def write_and_read(i):
        winners.keep(winner(times_ms=[[FAST, float(i)]] * 50))
        return winners.find("forward float32 H8:8", "cpu AVX2")

    with ThreadPoolExecutor(16) as pool:
        assert all(found is not None for found in pool.map(write_and_read, range(200)))
    assert [path.suffix for path in winners.folder().iterdir()] == [".json"]


def test_export_and_import(tmp_path, monkeypatch, capsys):
    winners.keep(winner())
    winners.keep(winner("backward"))
    winners.keep(winner("decode", build="0.0.1+other"))
    file = tmp_path / "tuned.json"
    assert cli.main(["tune", "export", str(file)]) == 0
    assert capsys.readouterr().out == f"3 results written to {file}\n"

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    assert winners.stamp() == ""
    assert cli.main(["tune", "import", str(file)]) == 0
    assert capsys.readouterr().out == "2 results kept; 1 of another version or instruction set left out\n"
    assert winners.find("backward", "cpu AVX2") == winner("backward")
    before = winners.stamp()
    assert before
    file.write_text(file.read_text() + "\n")
    assert cli.main(["tune", "import", str(file)]) == 0
    assert winners.stamp() != before


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2, "winners": []}', '{"format": 1}'])
def test_importing_something_else(content, tmp_path, capsys):
    file = tmp_path / "tuned.json"
    if content is not None:
        file.write_text(content)
    assert cli.main(["tune", "import", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("flex-inductor tune: ") and message.count("\n") == 1
    if content is not None:
        assert "expected a file that `flex-inductor tune export` wrote" in message
