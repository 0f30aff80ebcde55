"""The examples run; what they show they assert themselves. Quickly here without compiling, as they are in the long tests."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flex_inductor import set_eager_kernels

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# What each is run with quickly, and what it says then.
QUICK = {
    "packed_gpt": (["--steps", "2"], "largest relative error of a gradient"),
    "gpt_oss": (["--steps", "2", "--plot", "sinks.png"], "without sinks: wrong by"),
    "image_neighbours": (["--steps", "2", "--plot", "bias.svg"], "66% of the blocks are skipped"),
}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Dynamo imports a traced function's module by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)


def main(name):
    return importlib.import_module(name).main


@pytest.fixture
def uncompiled(monkeypatch):
    """A kernel takes longer to compile than all steps together; several threads would wait for each other."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    before, threads = set_eager_kernels("never"), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    set_eager_kernels(before)


def test_each_is_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path.name
        assert f"[{path.name}]({path.name})" in listed


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", QUICK)
def test_quickly(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, shown = QUICK[name]
    main(name)(arguments)
    assert shown in capsys.readouterr().out
    assert all(Path(file).stat().st_size > 0 for file in arguments if "." in file)


@pytest.mark.usefixtures("uncompiled")
def test_serve(capsys):
    main("serve")()
    assert capsys.readouterr().out.startswith("5 requests, 105 tokens, 52 steps")


@pytest.mark.parametrize("name", ["packed_gpt", "image_neighbours"])
def test_a_compiled_model_learns(name, capsys):
    main(name)(["--steps", "21" if name == "packed_gpt" else "51"])
    found = [
        float(line.split()[3].rstrip(","))
        for line in capsys.readouterr().out.splitlines()
        if line[:4] == "step"
    ]
    assert found[-1] < found[0] / 2


def test_sinks_count(capsys):
    main("gpt_oss")(["--steps", "100"])
    with_sinks, without = (
        float(line.split()[-2]) for line in capsys.readouterr().out.splitlines() if "wrong" in line
    )
    assert with_sinks < without / 2


def test_the_rest_compiled(capsys, tmp_path):
    main("video_tiles")(["--rounds", "1", "--plot", str(tmp_path / "schedules.png")])
    main("serve")()
    main("own_mod")([])
    shown = capsys.readouterr().out
    assert "route: cpu" in shown and "uses" in shown


def test_context_parallel():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "context_parallel.py"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0 and "step 7: loss" in done.stdout, done.stderr
