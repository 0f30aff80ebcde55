"""The commands of docs/context_parallel_plan.md run; tests/test_docs.py runs its Python."""

import re
import shlex
from pathlib import Path

from flex_inductor.tools import cli

PAGE = (Path(__file__).parents[2] / "docs/context_parallel_plan.md").read_text()

SCRIPT = """
from flex_inductor import masks as library

def masks():
    return {"full": library.causal(), "window": library.sliding_window(4096)}
"""


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    commands = re.findall(r"^flex-inductor (plan .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert cli.main(shlex.split(command)) == 0
    assert "cast*" in capsys.readouterr().out
    assert Path("plan.png").stat().st_size > 10_000 and Path("plan.json").stat().st_size > 10_000
