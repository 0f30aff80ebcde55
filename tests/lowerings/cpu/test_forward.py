"""The fused CPU kernels: blocks that do not fit, threads, waves, lengths, instructions; accuracy/test_edges.py has more."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecAVX2, pick_vec_isa

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.backend import flex_inductor as backend
from flex_inductor.lowerings.cpu import forward
from flex_inductor.lowerings.cpu.route import CpuRoute
from flex_inductor.op import Inputs, attention
from flex_inductor.options import call_options
from flex_inductor.reference import reference
from flex_inductor.tools.bench.harness import above_start
from tests.lowerings.cpu.helpers import SIZES, check, fused
from tests.support import (
    MASKS,
    MODS,
    Sizes,
    assert_within,
    attention_of,
    bounded,
    causal,
    dense_of,
    judge,
    run,
)


@torch._inductor.config.patch({"cpp.enable_kernel_profile": True})
def test_the_profiler_names_kernels():
    sizes = SIZES._replace(queries=20, keys=20)
    attend = fused(attention_of(None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        judge(attend, dense_of(None), sizes.inputs(torch.float32), (), None)
    names = {event.key.partition("_attention_")[2] for event in profiled.key_averages()}
    assert {"forward", "backward"} <= names


def test_blocks_that_panels_do_not_divide():
    sizes = SIZES._replace(queries=120, keys=133)
    mask = create_block_mask(causal, None, None, sizes.queries, sizes.keys, device="cpu", BLOCK_SIZE=(24, 7))
    for dtype in (torch.float32, torch.bfloat16):
        judge(fused(attention_of(None)), dense_of(None), sizes.inputs(dtype), (), mask)


@pytest.mark.parametrize(
    "dtype, mod, mask",
    [
        (torch.float32, "plain", "none"),
        (torch.bfloat16, "plain", "none"),
        (torch.bfloat16, "plain", "rows"),
        (torch.bfloat16, "softcap", "causal"),
    ],
    ids=str,
)
def test_scores_that_rise(dtype, mod, mask):
    """What is subtracted from a row's scores rises within a tile and between tiles, for some of the rows."""
    sizes = Sizes(queries=90, keys=700, head_dim=32, value_dim=40)
    query, key, value = sizes.inputs(torch.float64)
    # Rows that rise early, see nothing, fall, and rise late. All are far from 0: a row that is not raised must stay there.
    for column, rows, steps in (
        (0, [1.0, 0.0, -1.0, 0.0, -1.0], ((40, 3), (75, 9), (100, 20))),
        (1, [0.0, 0.0, -1.0, 1.0, -1.0], ((300, 30), (520, -40), (690, 130))),
        (2, [-40.0] * 5, ((0, 1),)),
    ):
        query[..., column], key[..., column] = torch.tensor(rows).repeat(18), 0
        for place, by in steps:
            key[..., place:, column] += by * sizes.head_dim**0.5
    captures, build = MODS[mod]
    inputs = [tensor.to(dtype) for tensor in (query, key, value)]
    masks = MASKS | {
        "rows": lambda s: create_block_mask(lambda b, h, i, j: i % 5 != 1, None, None, s.queries, s.keys)
    }
    judge(fused(attention_of(build)), dense_of(build), inputs, captures(sizes), masks[mask](sizes))


@pytest.mark.parametrize(
    "dtype, mod",
    [
        (torch.float32, "bucketed_bias"),
        pytest.param(torch.bfloat16, "plain", marks=pytest.mark.slow),
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
        for count in (1, 2, 3, 16):  # 16 take items of fewer rows
            torch.set_num_threads(count)
            results.append(run(attend, inputs, captures, mask).named())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_heads_in_waves(monkeypatch):
    """Five KV heads, as many at a time as the limit holds: two, two and one. The same bits as all at once."""
    sizes = Sizes(batch=5, heads=2, kv_heads=1, queries=130, keys=100, head_dim=16, value_dim=32)
    inputs, mask = sizes.inputs(torch.float32), MASKS["causal"](sizes)
    wide = [t.double() for t in inputs]
    allowed = bounded(
        torch.float32, (), lambda *_: dict(zip(("out", "lse"), dense_of(None)(*wide, (), mask), strict=False))
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
    assert_within(results[0], *allowed)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize(
    "heads, kv_heads, queries, kernel",
    [
        (32, 1, 1, "decode"),
        (20, 2, 4, "decode"),
        (2, 2, 16, "decode"),
        (20, 2, 5, "forward"),
        (2, 2, 17, "forward"),
    ],
)
def test_which_calls_do_not_pack_keys(heads, kv_heads, queries, kernel):
    """Those of 16 rows for each KV head, or of 4 queries."""
    sizes = Sizes(batch=1, heads=heads, kv_heads=kv_heads, queries=queries, keys=40)
    flex_inductor.decisions(clear=True)
    judge(fused(attention_of(None), dynamic=False), dense_of(None), sizes.inputs(torch.float32), (), None)
    found = {choice.kernel for decision in flex_inductor.decisions() for choice in decision.kernels}
    assert found == {kernel, "backward"}


@pytest.mark.parametrize("compact", [True, False])
def test_only_what_is_visited_is_packed(compact):
    """The last keys of a cache: packed, all of them would take 320 MB, or 192 with AVX2."""
    queries, keys, near, window = 70, 1 << 21, 200, 100

    def of_the_last(length, **options):
        shift = length - queries
        return create_block_mask(
            lambda b, h, q, kv: (q + shift >= kv) & (q + shift - kv < window),
            *(None, None, queries, length, "cpu"),
            **options,
        )

    mask = of_the_last(keys, compact=compact, BLOCK_SIZE=1 << 12)
    query, cache = torch.randn(1, 1, queries, 8), torch.zeros(1, 1, keys, 8)
    cache[:, :, -near:].normal_()
    attend = fused(lambda q, k: flex_attention(q, k, k, block_mask=mask), dynamic=False)
    found = []
    with torch.no_grad():
        attend(query, cache)  # compiles
        assert above_start(lambda: found.append(attend(query, cache))) < 100
        seen = cache[:, :, -near:].double()
        want = reference(query.double(), seen, seen, None, of_the_last(near))[0]
    torch.testing.assert_close(found[0].double(), want, atol=1e-6, rtol=1e-5)


def test_dynamic_length_compiles_once():
    attend = fused(attention_of(MODS["relative_bias"].build), dynamic=True)
    check("relative_bias", "causal", attend=attend, sizes=SIZES)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (40, 129, 300):
            sizes = SIZES._replace(queries=length, keys=length + 2)
            check("relative_bias", "causal", attend=attend, sizes=sizes)


def test_an_index_that_the_mod_has_used_before_is_checked():
    def build(table):
        return lambda score, b, h, q_idx, kv_idx: score * q_idx + table[q_idx]

    sizes = SIZES._replace(queries=20, keys=30)
    attend, inputs = fused(attention_of(build), dynamic=True), sizes.inputs(torch.float32)
    judge(attend, dense_of(build), inputs, (torch.linspace(-1, 1, 25),), None)
    with torch.no_grad(), pytest.raises(RuntimeError, match="index out of bounds"):
        attend(*inputs, (torch.ones(19),), None)


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


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="AVX2 is the first choice here")
@pytest.mark.parametrize(
    "mod, mask, dtype, sizes",
    [
        ("alibi", "sliding_window", torch.bfloat16, SIZES),
        ("alibi", "none", torch.float32, SIZES._replace(queries=1, keys=5000)),
    ],
    ids=["a tile", "one query"],
)
def test_with_avx2(mod, mask, dtype, sizes):
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert isinstance(pick_vec_isa(), VecAVX2)
        check(mod, mask, dtype, "bshd", sizes)


def test_rows_that_a_score_mod_hides_with_avx2():
    """Their scores and their logsumexp are -inf, whose difference would be NaN."""
    inputs = [t.requires_grad_() for t in SIZES.inputs(torch.float32)]

    def call(query, key, value):
        mod = lambda score, b, h, q_idx, kv_idx: torch.where(q_idx % 3 == 0, -torch.inf, score)  # noqa: E731
        return flex_attention(query, key, value, mod, enable_gqa=True)

    found = []
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        for run in (call, fused(call)):
            out = run(*inputs)
            found.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="AVX2 is the first choice here")
def test_the_matrix_with_avx2():
    here = f"{os.path.dirname(__file__)}/test_matrix.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", here, "-m", "not slow"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0 and passed and int(passed[1]) >= 2, result.stdout[-3000:]


def test_without_vector_instructions_the_route_is_not_available():
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        assert CpuRoute().available() == (False, "no vector instructions that torch knows")


@pytest.mark.parametrize("queries", [150, 1])
def test_a_mask_without_a_schedule_decides_everywhere(queries):
    """No block is listed: all are visited, by mask_mod."""
    sizes = SIZES._replace(queries=queries)
    mask = MASKS["per_batch"](sizes)

    @fused
    def attend(query, key, value, captures, block_mask):
        options = call_options(None, lse=True, max_scores=True)
        scale = query.size(-1) ** -0.5
        return attention(query, key, value, None, block_mask.mask_mod, scale, Inputs(), options)

    judge(attend, dense_of(None), sizes.inputs(torch.float32), (), mask)
