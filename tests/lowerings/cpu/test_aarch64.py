"""The CPU kernels as an aarch64 machine would compile and run them, under emulation."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.cpu_vec_isa import VecNEON

from tests.lowerings.cpu import aarch64
from tests.lowerings.cpu.helpers import fused
from tests.support import MASKS, MODS, Sizes, assert_within, attention_of, bounded, dense_of, judge, run

# torch 2.11 has a class for one length only.
SVE256 = cpu_vec_isa.VecSVE(256) if hasattr(cpu_vec_isa, "VecSVE") else cpu_vec_isa.VecSVE256()

pytestmark = pytest.mark.skipif(aarch64.missing() is not None, reason=f"{aarch64.missing()}")


def test_neon_forward_and_backward(tmp_path, monkeypatch):
    sizes = Sizes(queries=70, keys=90)
    captures, build = MODS["relative_bias"]
    inputs, captures, mask = sizes.inputs(torch.float32), captures(sizes), MASKS["causal"](sizes)
    with aarch64.machine(VecNEON(), "cortex-a72", tmp_path):
        attend = fused(attention_of(build), dynamic=False)
        first = judge(attend, dense_of(build), inputs, captures, mask).named()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        again = run(attend, inputs, [c.float() for c in captures], mask).named()
    assert all(torch.equal(first[name], again[name]) for name in first)


def _capped_with_bias(bias, place):
    return lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0) + bias[place[kv_idx]]


@pytest.mark.parametrize(
    "isa, cpu, dtype",
    [
        (VecNEON(), "cortex-a72", torch.float16),
        (SVE256, "max,sve-default-vector-length=32", torch.bfloat16),
    ],
    ids=["neon", "sve256"],
)
def test_decode(tmp_path, isa, cpu, dtype):
    sizes = Sizes(heads=8, queries=2, keys=300)
    inputs, mask = sizes.inputs(dtype), MASKS["per_batch"](sizes)
    bias, place = torch.linspace(-1, 1, 50).to(dtype), torch.arange(300) % 50
    dense = dense_of(_capped_with_bias)

    def named(attend, inputs, bias):
        return dict(zip(("out", "lse", "max_scores"), attend(*inputs, (bias, place), mask), strict=True))

    with aarch64.machine(isa, cpu, tmp_path), torch.no_grad():
        attend = fused(attention_of(_capped_with_bias), dynamic=False)
        wide = [t.double() for t in inputs]
        allowed = bounded(dtype, [bias], lambda captures, _: named(dense, wide, *captures))
        assert_within(named(attend, inputs, bias), *allowed)
        place[7] = 50
        with pytest.raises(RuntimeError, match="out of bounds"):
            named(attend, inputs, bias)
