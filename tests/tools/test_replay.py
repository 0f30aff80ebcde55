"""Kernels saved as scripts: what they compute on their random inputs is right."""

import os
import subprocess
import sys

import pytest
import torch

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.reference import reference
from tests import inspected
from tests.reports import report

RUN = """
import runpy, sys, torch
for script in sys.argv[1:]:
    found = runpy.run_path(script, run_name="__main__")
    torch.save({name: value for name, value in found.items() if isinstance(value, torch.Tensor)}, script + ".found")
"""


def replayed(*scripts):
    """The tensors that each script leaves behind, and what all print."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *map(str, scripts)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return *(torch.load(f"{script}.found") for script in scripts), result.stdout


def test_forward_and_backward_for_a_gpu(tmp_path):
    module, _ = inspected.learnable_bias()
    kernels = report("learnable_bias", "sm_90").kernels
    forward, dq, dkdv, printed = replayed(*(kernel.save(tmp_path) for kernel in kernels))
    module.bias.data = forward["captured_0"]
    qkv = (forward[name] for name in ("query", "key", "value"))
    out, lse, _ = reference(*qkv, module.relative, module.mask)
    torch.testing.assert_close(forward["out"], out, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(forward["lse"], lse, rtol=1e-3, atol=1e-3)
    for found, names in ((dq, ("d_query", "sum_0")), (dkdv, ("d_key", "d_value"))):
        for name in names:
            assert found[name].isfinite().all() and found[name].count_nonzero() > found[name].numel() / 3
    assert [line.partition(" ")[0] for line in printed.splitlines()] == [
        "out", "lse", "sum_0", "d_query", "d_key", "d_value",
    ]  # fmt: skip


@pytest.mark.slow
def test_changing_lengths_and_bfloat16(tmp_path):
    mask = create_block_mask(inspected.causal, None, None, 64, 64, "cpu", BLOCK_SIZE=32)

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=mask)

    qkv = torch.zeros(1, 64, 2, 3, 32, dtype=torch.bfloat16).transpose(1, 2).unbind(3)
    torch._dynamo.mark_dynamic(qkv[0], 0)
    (kernel,) = flex_inductor.inspect(attend, *qkv, target="gfx942").kernels
    found, _ = replayed(kernel.save(tmp_path))
    assert found["query"].stride() == qkv[0].stride()
    want, _, _ = reference(found["query"], found["key"], found["value"], None, mask)
    torch.testing.assert_close(found["out"], want, rtol=1e-2, atol=1e-3)


def test_on_cpu(tmp_path):
    (kernel,) = report("plain_causal", "cpu").kernels
    script = kernel.save(tmp_path / "new")
    found, printed = replayed(script)
    mask = inspected.block_mask(inspected.causal)
    want, _, _ = reference(found["in_0"], found["in_1"], found["in_2"], None, mask)
    torch.testing.assert_close(found["out_0"], want, rtol=1e-2, atol=1e-3)
    assert " ms\n" in printed
    assert str(tmp_path) not in script.read_text() and "inspected.py:" in script.read_text()
