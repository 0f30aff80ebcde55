import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from flex_inductor.tools import cli

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def script(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "attend.py"
    path.write_text(example)
    return path


def test_example_runs_and_trains(script):
    names = runpy.run_path(str(script), run_name="__main__")
    for name in ("query", "key", "value", "slopes"):
        gradient = names[name].grad
        assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0, name


def test_report_is_what_the_command_prints(script, monkeypatch, capsys):
    text = README.read_text()
    command, report = re.search(
        r"^\$ flex-inductor (.*?[^\\])\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ).groups()
    monkeypatch.chdir(script.parent)
    assert cli.main(shlex.split(command.replace("\\\n", ""))) == 0
    printed = iter([named(line) for line in capsys.readouterr().out.splitlines()])
    for line in report.splitlines():
        assert line == "..." or named(line) in printed, f"not printed, or not in this order: {line}"


def named(line):
    """The line, only its name where it says what a compiler of one version makes."""
    found = re.match(r"1 attention call|   (uses|has|occupancy) |(?=             \w+ \d)", line)
    return found[0] if found else line
