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


# Starting a process costs as much as several tests: there are two, for two workers.
FILES = sorted(HERE.glob("interpreted_*.py"))


@pytest.mark.parametrize("files", [FILES[::2], FILES[1::2]], ids=["one half", "other half"])
def test_numerics(files):
    alone = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    result = python("-m", "pytest", *alone, *files, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-8000:]
    assert " skipped" not in result.stdout


SCRIPT = """
import sys
import torch
from flex_inductor import decisions, flex_attention
from flex_inductor.tools import interpret

q = torch.randn(1, 1, 20, 16, requires_grad=True)
out = interpret.run(flex_attention, q, q.detach(), q.detach())
out.sum().backward()
torch.testing.assert_close(out, flex_attention(q, q.detach(), q.detach()))
print(sys.argv[1:], [d.chosen for d in decisions()], q.grad.isfinite().all().item())
"""


def test_script_is_run_in_the_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = python("-m", "flex_inductor.tools.interpret", script, "--flag", "5")
    assert result.stdout == "['--flag', '5'] ['triton', 'triton'] True\n", result.stderr


def test_without_the_environment_the_command_is_named():
    with pytest.raises(FlexError) as error:
        interpret.run(lambda x: x, 1)
    assert str(error.value) == (
        "interpret.run needs TRITON_INTERPRET=1 set before triton is imported, which it was not. "
        "Run the script with: python -m flex_inductor.tools.interpret script.py [args]"
    )
