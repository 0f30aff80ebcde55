"""flex-inductor profile: what it prints and writes, and how it refuses."""

import json
import re

import expecttest
import pytest

from flex_inductor.tools import cli, ptx

SCRIPT = """
from flex_inductor import flex_attention


def tilted(score, b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return score - 0.5 * distance


def attend(q, k, v):
    return flex_attention(q, k, v, tilted)


def nothing(q):
    return q
"""
QKV = [f"--input={name}=1x1x64x16:f16:grad" for name in "qkv"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "model.py"
    path.write_text(SCRIPT)
    return path


def run(capsys, *argv):
    try:
        status = cli.main(["profile", *argv])
    except SystemExit as stop:  # of argparse
        status = stop.code
    return status, *capsys.readouterr()


def test_page_and_json(script, capsys, tmp_path):
    saved = tmp_path / "counts.json"
    status, out, err = run(capsys, f"{script}:attend", *QKV, "--target", "sm_90", "--json", str(saved))
    assert (status, out, err) == (0, f"written to {saved}\n", "")
    kernels = json.loads(saved.read_text())["kernels"]
    own = [kernel for kernel in kernels if "flex_inductor" in kernel["name"] and kernel["lines"]]
    assert [k["name"].rpartition("_")[0] for k in own] == [
        "flex_inductor_forward",
        "flex_inductor_backward_dq",
        "flex_inductor_backward_dkdv",
    ]
    for kernel in own:
        assert all(re.match(r"score_mod: model.py:[67]\b", line) for line in kernel["lines"])
        assert kernel["total"]["instructions"] == sum(r["instructions"] for r in kernel["families"].values())
        assert kernel["total"]["products"] >= 2 * 64 * 64 * 16 and kernel["spill_bytes"] == 0
        assert kernel["model"]["card"] == "H100" and kernel["model"]["seconds"] > 0


class Printed(expecttest.TestCase):
    maxDiff = None

    @pytest.fixture(autouse=True)
    def given(self, script, capsys):
        self.script, self.capsys = script, capsys

    def test_printed(self):
        """Numbers are left out, and which families there are."""
        status, out, err = run(
            self.capsys, f"{self.script}:attend", *QKV, "--target", "sm_80", "--no-backward"
        )
        assert (status, err) == (0, "")
        kept = [
            line.strip()
            for line in out.splitlines()
            if re.match(r"==|   (config|uses|time) |  +(instr|all)|  score_mod|Time", line)
            or "sectors" in line
        ]
        text = "\n".join(re.sub(r" +", " ", re.sub(r"\d[\d.,]*", "N", line)) for line in kept)
        self.assertExpectedInline(
            text,
            """\
== flex_inductor_decode_N: N blocks
config BLOCK_M N BLOCK_N N num_warps N num_stages N
uses N registers, N bytes spilled, N bytes of shared memory
time a model: N us on AN bound by latency
instructions sectors a request ideal conflicts read written products cycles
Time and cycles are a model's, by published latencies: cycles of an average warp, waiting and issuing. Nothing was measured on a""",
        )


def test_a_card_without_a_model_has_no_time(script, capsys):
    status, out, err = run(capsys, f"{script}:attend", *QKV, "--target", "sm_100", "--no-backward")
    assert (status, err) == (0, "")
    assert "   time    none: there are models of sm_80, sm_89, sm_90 alone\n" in out
    assert "model's" not in out and " all " in out


REFUSED = {
    "target": ("attend", ["--target", "sm_1"], "argument --target: invalid choice: 'sm_1' (choose from "),
    "no target": ("attend", [], "the following arguments are required: --target"),
    "input": ("attend", ["--target=sm_80", "--input=q=3:f8"], "--input q=3:f8: expected NAME=SHAPE:DTYPE such as "),
    "function": ("missing", ["--target=sm_80"], "{script} has no function 'missing'; it has "),
    "no kernel": ("nothing", ["--target=sm_80", "--input=q=4"], "{script}:nothing launches no kernels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, script, capsys):
    function, argv, message = REFUSED[name]
    status, out, err = run(capsys, f"{script}:{function}", *argv)
    assert (status, out) == (2, "")
    assert err.startswith(f"flex-inductor profile: {message.format(script=script)}") and err.count("\n") == 1


def test_a_fault_is_one_line(script, capsys, monkeypatch):
    def faulty(*_args, **_options):
        raise ptx.Fault("race", "forward: race: nobody waited", 3)

    monkeypatch.setattr(ptx, "run_compiled", faulty)
    status, out, err = run(capsys, f"{script}:attend", *QKV, "--target", "sm_80")
    assert (status, out) == (2, "")
    assert "attend fails: Fault: forward: race: nobody waited" in err and err.count("\n") == 1
