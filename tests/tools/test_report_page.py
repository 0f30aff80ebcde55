"""What docs/inspector.md shows is what the command prints."""

import re
import shlex
from pathlib import Path

from flex_inductor.tools import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs/inspector.md").read_text()


def test_report_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "attend.py").write_text(code)
    command, report = re.search(
        r"^\$ flex-inductor (inspect attend.*?[^\\])\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    ).groups()
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command.replace("\\\n", ""))) == 0
    printed = iter([named(line) for line in capsys.readouterr().out.splitlines()])
    for line in report.splitlines():
        assert line == "..." or named(line) in printed, f"not printed, or not in this order: {line}"


def named(line):
    """The line, only its name where it says what a compiler of one version makes."""
    found = re.match(r"1 attention call|   (uses|has|occupancy) |(?=             \w+ \d)", line)
    return found[0] if found else line
