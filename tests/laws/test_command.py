"""flex-inductor check: what it prints and writes, its exit status, and how it refuses."""

import json
import re
import shlex
from pathlib import Path

import expecttest
import pytest
import torch

from flex_inductor.tools import cli
from tests.laws import functions

SCRIPT = str(Path(functions.__file__))
QUICK = [f"--law={law}" for law in ("masked", "shift", "documents", "schedule")]
QKV = [f"--input={name}=1x{heads}x80x16" for name, heads in zip("qkv", (2, 1, 1), strict=True)]


def run(capsys, *argv):
    try:
        status = cli.main(["check", *argv])
    except SystemExit as stop:  # of argparse
        status = stop.code
    return status, *capsys.readouterr()


def test_all_hold(capsys):
    status, out, err = run(capsys, f"{SCRIPT}:right", "--documents=30,50", *QUICK)
    assert (status, err) == (0, "")
    expecttest.assert_expected_inline(
        out,
        """\
Laws of attend
holds  masked     8 rows of each head, with NaN and Inf in all that they do not see. 1 call of 1 kind.
holds  shift      A constant added to all scores. 1 call of 1 kind.
holds  documents  2 documents, of which 2 were replaced, each by itself.
holds  schedule   Every pair, by mask_mod and by the blocks that are visited. 1 call of 1 kind.
holds 4
""",
    )


def test_a_broken_law(capsys, tmp_path):
    saved = tmp_path / "report.json"
    status, out, _ = run(capsys, f"{SCRIPT}:documents", "--documents=30,50", "--json", str(saved), *QUICK)
    assert status == 1 and out.endswith("holds 3, broken 1\n") and "broken" in out
    report = json.loads(saved.read_text())
    assert not report["ok"] and report["subject"] == "attend"
    (first, _) = [law for law in report["laws"] if law["outcome"] == "broken"]
    assert first["law"] == "documents" and "Moved with it: document 1 (tokens 30 to 79)" in first["text"]


def test_with_inputs(capsys):
    status, out, err = run(capsys, f"{SCRIPT}:attends", *QKV, "--law=masked", "--law=batch")
    assert (status, err) == (0, "")
    assert out.endswith("holds 2\n")


def test_inputs_hold_numbers():
    from flex_inductor.tools.check import _filled

    assert (
        _filled(torch.zeros(8, requires_grad=True)).std() > 0.1 and _filled(torch.zeros(8).long()).sum() == 0
    )


def test_what_could_not_run(capsys, monkeypatch):
    def broken(fn):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("flex_inductor.laws.functions.compiled", broken)
    status, out, _ = run(capsys, f"{SCRIPT}:right", "--law=compiled", "--law=shift")
    assert status == 2 and "could not run" in out and "RuntimeError: no compiler" in out
    assert out.endswith("holds 1, could not run 1\n")


def test_a_model(capsys):
    pytest.importorskip("transformers")
    models = SCRIPT.replace("functions.py", "models.py")
    status, out, _ = run(capsys, f"{models}:with_a_cache", "--law=documents", "--law=shift")
    assert status == 1 and out.startswith("Laws of LlamaForCausalLM, sdpa\n")
    assert "which makes no call of flex_attention with mods" in out
    status, _, err = run(capsys, f"{models}:with_a_cache", "--documents=20,28")
    assert status == 2 and "--documents: a model's batch says itself where documents begin" in err


PAGE = (Path(__file__).parents[2] / "docs/check.md").read_text()


@pytest.mark.parametrize("number, name", [*enumerate(("packed.py", "llama.py"))])
def test_the_page_shows_what_is_printed(number, name, capsys, tmp_path, monkeypatch):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    command, report = re.findall(
        r"^\$ flex-inductor check (.*?[^\\])\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )[number]
    (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, *shlex.split(command.replace("\\\n", "")))
    assert status == 1 and re.sub(r"[-\d.]+", "0", out) == re.sub(r"[-\d.]+", "0", report)


def test_colours():
    import io

    from rich.console import Console

    from flex_inductor.laws import Report, Result

    report = Report("f", [Result("shift", "holds", "well [1]"), Result("batch", "broken", "ill")])
    assert not report.ok and [failure.law for failure in report.failures] == ["batch"]
    text = io.StringIO()
    report.show(Console(file=text, force_terminal=True, color_system="standard", width=60))
    assert "\x1b[32mholds" in text.getvalue() and "\x1b[1;31mbroken" in text.getvalue()
    assert "\x1b" not in str(report) and "well [1]" in str(report)


REFUSED = {
    "law": ([f"{SCRIPT}:right", "--law=shifts"], "laws: got 'shifts', expected some of masked, shift, "),
    "lengths": ([f"{SCRIPT}:right", "--documents=30,x"], "argument --documents: expected lengths such as 40,56, got '30,x'."),
    "documents": ([f"{SCRIPT}:right", "--documents=30,40"], "documents: they have 70 tokens, and no input has"),
    "raises": ([f"{SCRIPT}:raises"], f"{SCRIPT}:raises fails: ZeroDivisionError: one by zero (functions.py:"),
    "needs inputs": ([f"{SCRIPT}:attends"], f"{SCRIPT}:attends: no --input for q, k, v; give it, such as --input q="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, capsys):
    argv, message = REFUSED[name]
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"flex-inductor check: {message}") and err.count("\n") == 1
