"""Triton decides when it is imported whether to interpret: these tests run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flex_inductor import FlexError
from flex_inductor.tools import interpret

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def python(*args, **env):
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=ROOT, env=os.environ | env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "chosen",
    [
        "not slow and not long",
        "not slow and long",
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_numerics(chosen):
    """In one process: to start another and compile there for the first time takes as long as several tests.

    It ends with the first that fails: a broken template fails them all, some for minutes.
    """
    alone = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", chosen]
    result = python("-m", "pytest", *alone, *sorted(HERE.glob("interpreted_*.py")), TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-8000:]
    assert " skipped" not in result.stdout


SCRIPT = """
import sys
import torch
from flex_inductor import decisions, flex_attention
from flex_inductor.tools import interpret

q = torch.randn(1, 1, 20, 16)
torch.testing.assert_close(interpret.run(flex_attention, q, q, q), flex_attention(q, q, q))
print(sys.argv[1:], [d.chosen for d in decisions()])
"""


def test_script_is_run_in_the_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = python("-m", "flex_inductor.tools.interpret", script, "--flag", "5")
    assert result.stdout == "['--flag', '5'] ['triton']\n", result.stderr


def test_without_the_environment_the_command_is_named():
    with pytest.raises(FlexError) as error:
        interpret.run(lambda x: x, 1)
    assert str(error.value) == (
        "interpret.run needs TRITON_INTERPRET=1 set before triton is imported, which it was not. "
        "Run the script with: python -m flex_inductor.tools.interpret script.py [args]"
    )
