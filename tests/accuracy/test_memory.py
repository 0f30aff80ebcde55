"""Peak memory of the chunked route: bounded by tiles, not by queries times keys."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from flex_inductor import and_masks, create_block_mask, flex_attention, set_eager_kernels
from flex_inductor.backend import flex_inductor
from flex_inductor.tools.bench.harness import above_start, in_a_new_thread
from tests.memory import peak_allocated
from tests.support import causal

pytestmark = pytest.mark.usefixtures("optimized")  # lengths are long

ROOT = Path(__file__).parents[2]
LENGTH = 8192
LIMIT = 512 * 2**20  # dense attention would take over 4 GiB


@pytest.fixture(autouse=True)
def in_chunks():
    """Eager calls as large as these would be compiled."""
    before = set_eager_kernels("never")
    yield
    set_eager_kernels(before)


def test_the_gauge_itself():
    def allocate():
        first = torch.empty(3 * 2**20, dtype=torch.uint8)
        second = torch.empty(2**20, dtype=torch.uint8)
        del first, second
        torch.empty(2**21, dtype=torch.uint8)

    assert peak_allocated(allocate) == 4 * 2**20


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 256


def extra_memory(attend, mask_mod, bias=None) -> int:
    """Peak of a forward and backward beyond the gradients, at B1 H8 D64 fp32."""
    inputs = [torch.randn(1, 8, LENGTH, 64, requires_grad=True) for _ in range(3)]
    wanted = inputs if bias is None else [*inputs, bias]
    block_mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")
    upstream = torch.randn(1, 8, LENGTH, 64)

    def step():
        out = attend(*inputs, block_mask, bias)
        for tensor, grad in zip(wanted, torch.autograd.grad(out, wanted, upstream), strict=True):
            tensor.grad = grad

    return peak_allocated(step) - sum(tensor.grad.nbytes for tensor in wanted)


def plain(query, key, value, block_mask, bias):
    return flex_attention(query, key, value, block_mask=block_mask)


def relative(query, key, value, block_mask, bias):
    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx - kv_idx + LENGTH]

    return flex_attention(query, key, value, mod, block_mask)


@pytest.mark.parametrize(
    "attend, bias",
    [pytest.param(plain, None, marks=pytest.mark.slow), (relative, torch.randn(2 * LENGTH))],
    ids=["plain", "relative"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "mask_mod",
    # A window walks the same tiles, only fewer of them.
    [
        pytest.param(and_masks(causal, window), id="window"),
        pytest.param(causal, id="causal", marks=pytest.mark.slow),
    ],
)
def test_peak_memory(attend, bias, compiled, mask_mod):
    bias = None if bias is None else bias.requires_grad_()
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend=flex_inductor, fullgraph=True)
    extra = extra_memory(attend, mask_mod, bias)
    assert extra <= LIMIT, f"{extra / 2**20:.0f} MiB"


# The CPU kernels hold the gradients of keys once for each of their parts, in whole vectors: fewer tokens there.
@pytest.mark.parametrize(
    "route, length, block",
    [
        (None, 1 << 16, 8),
        pytest.param("chunked", 1 << 16, 8, marks=pytest.mark.slow),
        ("cpu", 1 << 14, 2),
    ],
)
def test_runs_need_no_memory_by_blocks(route, length, block):
    """8192 x 8192 blocks: one flag for each would be 64 MiB, one list of them 256 MiB."""
    torch._dynamo.reset()
    options = {"route": route}
    compiled = torch.compile(plain, backend=flex_inductor, fullgraph=True, dynamic=True, options=options)
    attend = compiled if route else plain

    def step(length):
        documents = torch.arange(length).double() // 97  # of integers the schedule would be bounds
        mask_mod = and_masks(causal, lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx])
        schedule = create_block_mask(mask_mod, None, None, length, length, "cpu", block, compact=True)
        inputs = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
        torch.autograd.grad(attend(*inputs, schedule, None).sum(), inputs)

    step(1 << 10)  # compiles
    extra = above_start(lambda: step(length))
    assert extra <= 48, f"{extra:.0f} MiB"


def held_by_kernels(dtype: torch.dtype) -> list[float]:
    """MiB that a process takes for a forward and backward beyond their results, with one thread and with two."""
    length = 1 << 14
    options = {"route": "cpu"}
    attend = torch.compile(plain, backend=flex_inductor, fullgraph=True, dynamic=False, options=options)
    block_mask = create_block_mask(and_masks(causal, window), None, None, length, length, device="cpu")
    inputs = [torch.randn(1, 8, length, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    results: list[torch.Tensor] = []

    def step(threads: int) -> None:
        torch.set_num_threads(threads)
        out = attend(*inputs, block_mask, None)
        results[:] = out, *torch.autograd.grad(out, inputs, inputs[0])

    in_a_new_thread(partial(step, 1))  # compiles
    held = []
    for count in (1, 2):
        results.clear()
        above = above_start(partial(in_a_new_thread, partial(step, count)))
        held.append(above - sum(tensor.nbytes for tensor in results) / 2**20)
    return held


# MiB for each thread, of which the last 4 or 2 are kept of the forward. Without bf16 instructions the kernels hold keys and
# values as fp32.
PAIRS = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
HELD = {"float32": 24, "bfloat16": 16 if PAIRS else 24}
SCRIPT = """
import torch
from flex_inductor.tools.bench.harness import return_freed_memory
from tests.accuracy.test_memory import HELD, held_by_kernels
return_freed_memory()
for dtype in HELD:
    print(*held_by_kernels(getattr(torch, dtype)))
"""


def test_what_each_thread_of_the_cpu_kernels_holds():
    """At B1 H8 S16384 D64. The kernels' own memory is not the allocator's: a process of its own is measured."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    slack = 6  # pages come in groups: up to 4 MiB more were seen
    for (dtype, mebibytes), line in zip(HELD.items(), done.stdout.splitlines(), strict=True):
        for count, held in enumerate(map(float, line.split()), start=1):
            assert mebibytes / 2 < held <= mebibytes * count + slack, (
                f"{held:.1f} MiB, {dtype}, {count} threads"
            )
