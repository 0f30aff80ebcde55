"""The fused CPU kernels on edge cases: tiles that do not fit, dead rows, wrong indices, threads, lengths."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

import pytest
import torch

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.backend import flex_inductor as backend
from flex_inductor.lowerings.cpu import forward
from tests.lowerings.cpu.helpers import SIZES, check, fused
from tests.support import MASKS, MODS, Sizes, assert_accurate, attention_of, causal, dense_of, judge, run


@pytest.mark.usefixtures("optimized")
def test_blocks_that_panels_do_not_divide():
    sizes = SIZES._replace(queries=120, keys=133)
    mask = create_block_mask(causal, None, None, sizes.queries, sizes.keys, device="cpu", BLOCK_SIZE=(24, 7))
    for dtype in (torch.float32, torch.bfloat16):
        judge(fused(attention_of(None)), dense_of(None), sizes.inputs(dtype), (), mask)


def test_rows_without_live_lanes():
    mask = create_block_mask(lambda b, h, q, kv: (q % 3 != 1) & (kv < 20), None, None, 64, 64, device="cpu")
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    with torch.no_grad():
        out, lse, peak = fused(attention_of(None))(q, k, v, (), mask)
    dead = torch.arange(64) % 3 == 1
    assert (out[:, :, dead] == 0).all() and out[:, :, ~dead].abs().min() > 0
    assert (lse[:, :, dead] == -torch.inf).all() and (peak[:, :, dead] == -torch.inf).all()
    assert lse[:, :, ~dead].isfinite().all()


def test_nan_stays_in_its_row():
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    q[0, 0, 7, 3] = torch.nan
    with torch.no_grad():
        out, lse, _ = fused(attention_of(None))(q, k, v, (), None)
    assert out[0, 0, 7].isnan().all() and lse[0, 0, 7].isnan()
    assert torch.cat([out[0, 0, :7], out[0, 0, 8:]]).isfinite().all()


def test_live_index_out_of_range_raises_and_masked_one_does_not():
    bias = torch.randn(50)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[kv], mask)

    mask = create_block_mask(lambda b, h, q, kv: kv < 50, None, None, 64, 64, device="cpu")
    with torch.no_grad():
        expected = flex_attention(q, k[:, :, :50], v[:, :, :50], lambda s, b, h, q, kv: s + bias[kv])
        torch.testing.assert_close(fused(attend)(q, k, v, mask), expected)
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            fused(attend)(q, k, v, None)


def test_negative_index_wraps():
    bias = torch.randn(200)
    q, k, v = (torch.randn(1, 2, 90, 16) for _ in range(3))

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[q - kv])

    with torch.no_grad():
        torch.testing.assert_close(fused(attend)(q, k, v), attend(q, k, v))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "dtype, mod",
    [
        (torch.float32, "bucketed_bias"),
        (torch.bfloat16, "plain"),
        pytest.param(torch.float32, "plain", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "bucketed_bias", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_threads(dtype, mod):
    sizes = Sizes(queries=400, keys=400, head_dim=32, value_dim=32)
    mask = create_block_mask(causal, None, None, 400, 400, device="cpu", BLOCK_SIZE=64)
    captures, build = MODS[mod]
    captures = [c.to(dtype) if c.is_floating_point() else c for c in captures(sizes)]
    attend, inputs = fused(attention_of(build)), sizes.inputs(dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(run(attend, inputs, captures, mask).named())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.usefixtures("optimized")
def test_heads_in_waves(monkeypatch):
    """Five KV heads, as many at a time as the limit holds: two, two and one. The same bits as all at once."""
    sizes = Sizes(batch=5, heads=2, kv_heads=1, queries=130, keys=100, head_dim=16, value_dim=32)
    inputs, mask = sizes.inputs(torch.float32), MASKS["causal"](sizes)
    gold, eager = (
        dict(zip(("out", "lse"), dense_of(None)(*given, (), mask), strict=False))
        for given in ([t.double() for t in inputs], inputs)
    )
    threads, results = torch.get_num_threads(), []
    try:
        for packed_bytes in (2 * 128 * (16 + 32) * 4, forward.PACKED_BYTES):
            monkeypatch.setattr(forward, "PACKED_BYTES", packed_bytes)
            torch._dynamo.reset()
            attend = fused(attention_of(None), dynamic=False)
            with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
                for count in (1, 2):
                    torch.set_num_threads(count)
                    results.append(dict(zip(("out", "lse"), attend(*inputs, (), mask), strict=False)))
    finally:
        torch.set_num_threads(threads)
    assert_accurate(results[0], eager, gold, torch.float32)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.usefixtures("optimized")
def test_dynamic_length_compiles_once():
    attend = fused(attention_of(MODS["relative_bias"].build), dynamic=True)
    check("relative_bias", "causal", attend=attend, sizes=SIZES)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 129, 300):
            sizes = SIZES._replace(queries=length, keys=length + 2)
            check("relative_bias", "causal", attend=attend, sizes=sizes)


def test_refusals_are_recorded_with_their_reason():
    def per_lane_tensor(score, b, h, q_idx, kv_idx):
        return score + (table[q_idx] * table[kv_idx]).sum()

    def from_nothing(score, b, h, q_idx, kv_idx):
        return score + nothing[kv_idx]

    table, nothing = torch.randn(64, 3), torch.zeros(0)
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    for inputs, mod, reason in (
        ([t.double() for t in (q, k, v)], None, "no float64; float32, bfloat16, float16 only"),
        ((q, k, v), per_lane_tensor, "score_mod computes a tensor for each score"),
        ((q, k, v), from_nothing, "a captured tensor has no elements to look up"),
    ):
        flex_inductor.decisions(clear=True)
        with torch.no_grad():
            with contextlib.suppress(IndexError):  # there is nothing to find
                torch.compile(flex_attention, backend=backend)(*inputs, mod)
            (decision,) = flex_inductor.decisions()
            assert decision.chosen == "chunked" and reason in dict(decision.rejected)["cpu"]
            with pytest.raises(Exception, match=reason):
                fused(flex_attention)(*inputs, mod)


def run_with_capability(capability, *command):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="AVX2 is the first choice here")
@pytest.mark.parametrize("cases", ["alibi", pytest.param("", marks=pytest.mark.slow)], ids=["some", "every"])
def test_the_matrix_with_avx2(cases):
    here = f"{os.path.dirname(__file__)}/test_matrix.py"
    result = run_with_capability(
        "avx2", "-m", "pytest", "-p", "no:cacheprovider", here, "-m", "not slow", "-k", cases
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and passed and int(passed[1]) >= 2, result.stdout[-3000:]


def test_without_vector_instructions_the_route_is_not_available():
    ask = "from flex_inductor.lowerings.cpu.route import CpuRoute as R; print(R().available())"
    result = run_with_capability("default", "-c", ask)
    assert result.stdout.strip() == "(False, 'no vector instructions that torch knows')", result.stderr
