"""flex-inductor inspect: what it prints and writes, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flex_inductor.tools import cli
from tests import inspected

SCRIPT = str(Path(inspected.__file__))
QKV = [f"--input={name}=1x2x256x32:f16" for name in "qkv"]


def run(capsys, *argv):
    status = cli.main(["inspect", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_page(capsys):
    status, out, err = run(capsys, f"{SCRIPT}:plain_causal")
    assert (status, err) == (0, "")
    assert out.startswith("1 attention call, 1 kernel for cpu")
    assert "chosen:   cpu (fused C++ forward)" in out and "mask_mod causal, inspected.py:" in out


def test_inputs_and_target(capsys, monkeypatch):
    status, out, err = run(capsys, "flex_inductor:flex_attention", *(i.replace("=q=", "=query=").replace("=k=", "=key=").replace("=v=", "=value=") for i in QKV), "--target", "gfx942")  # fmt: skip
    assert (status, err) == (0, "")
    assert "1 kernel for gfx942" in out and "chosen:   triton" in out and "registers, 0 bytes spilled" in out


def test_only_some_kernels(capsys):
    whole = ("--source-only", "--kernel", "backward")
    status, out, _ = run(capsys, f"{SCRIPT}:learnable_bias", *whole)
    assert status == 0 and out.count('extern "C"') == 1 and "backward" not in out.partition("\n")[0]
    assert "// score_mod: inspected.py:" in out
    assert run(capsys, f"{SCRIPT}:learnable_bias", *whole, "--no-backward")[0] == 2


def test_against_a_saved_report(capsys, tmp_path):
    saved, page = tmp_path / "before.json", tmp_path / "page.html"
    status, out, _ = run(capsys, f"{SCRIPT}:alibi_documents", "--json", str(saved), "--html", str(page))
    assert (status, out) == (0, f"written to {page}\nwritten to {saved}\n")
    assert run(capsys, f"{SCRIPT}:alibi_documents", "--against", str(saved))[1] == "no difference\n"

    before = json.loads(saved.read_text())
    before["calls"][0]["decisions"]["forward"]["chosen"] = "chunked"
    before["calls"][0]["graphs"]["score_mod"] = before["calls"][0]["graphs"]["score_mod"].replace(
        "mul", "div"
    )
    before["kernels"][0]["config"]["block_m"] = 65
    before["calls"][0]["score_mod"]["captures"][0]["dtype"] = "float64"
    before["plans"] = [{"chosen": "ring"}]
    saved.write_text(json.dumps(before))
    _, out, _ = run(capsys, f"{SCRIPT}:alibi_documents", "--against", str(saved))
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "call 0" and "forward chosen: chunked -> cpu" in lines
    assert any(
        line.startswith("score_mod ") and line.endswith(" dtype: float64 -> float32") for line in lines
    )
    assert "plan 0: gone" in lines
    assert any(line.startswith("config block_m: 65 -> ") for line in lines)
    assert any(line.startswith("+    mul = aten.mul(") for line in lines)


REFUSED = {
    "too large": (
        [f"{SCRIPT}:fails", "--input", "q=99999x99999x99999x99999"],
        "--input q=99999x99999x99999x99999 fails: RuntimeError: Storage size calculation overflowed",
    ),
    "no colon": (["script.py"], "expected path/to/script.py:function or module:function, got 'script.py'"),
    "nothing": ([], "needs a function: path/to/script.py:function or module:function"),
    "no file": (["nowhere.py:f"], "nowhere.py: no such file"),
    "no module": (["nowhere:f"], "nowhere fails: ModuleNotFoundError: No module named 'nowhere' "),
    "no function": ([f"{SCRIPT}:nothing"], f"{SCRIPT} has no function 'nothing'; it has "),
    "fails": ([f"{SCRIPT}:fails"], f"{SCRIPT}:fails fails: ZeroDivisionError: integer division or modulo by zero ("),
    "no attention": ([f"{SCRIPT}:no_attention"], "relu never calls flex_attention with these arguments: "),
    "devices": ([f"{SCRIPT}:two_devices"], "The arguments are on several devices: cpu, meta. Move them to one; "),
    "needs arguments": ([f"{SCRIPT}:causal"], f"{SCRIPT}:causal: no --input for b, h, q_idx, kv_idx; give it, such as --input b="),
    "returns another": ([f"{SCRIPT}:inputs"], f"{SCRIPT}:inputs must return (fn, args) with a tuple or a dict of arguments, but"),
    "input": ([f"{SCRIPT}:causal", "--input", "b=3:f8"], "--input b=3:f8: expected NAME=SHAPE:DTYPE such as "),
    "an argument without input": ([f"{SCRIPT}:causal", *(f"--input={name}=3" for name in ("b", "h", "kv_idx"))], f"{SCRIPT}:causal: no --input for q_idx; "),
    "inputs": ([f"{SCRIPT}:causal", "--input", "z=3:f16"], f"--input: {SCRIPT}:causal(b, h, q_idx, kv_idx) does not take z"),
    "target": ([f"{SCRIPT}:plain_causal", "--target", "sm_1"], "target: expected one of cpu, sm_80, "),
    "against": ([f"{SCRIPT}:plain_causal", "--against", SCRIPT], f"--against {SCRIPT}: not a report saved with --json ("),
    "kernel": ([f"{SCRIPT}:plain_causal", "--kernel", "nothing"], "--kernel nothing: no such kernel; there is forward"),
}  # fmt: skip


def test_against_json_of_something_else(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("{}")
    err = run(capsys, f"{SCRIPT}:plain_causal", "--against", str(other))[2]
    assert err == f"flex-inductor inspect: --against {other}: not a report saved with --json\n"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, capsys):
    argv, message = REFUSED[name]
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"flex-inductor inspect: {message}") and err.count("\n") == 1


def test_a_script_that_exits_and_prints(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('hello')\nraise SystemExit(3)\n")
    result = subprocess.run(
        [sys.executable, "-m", "flex_inductor.tools.cli", "inspect", f"{script}:f"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == f"hello\nflex-inductor inspect: {script} fails: SystemExit: 3 (script.py:2)\n"
