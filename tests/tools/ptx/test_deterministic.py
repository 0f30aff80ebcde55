"""Captured gradients under torch.use_deterministic_algorithms as cards get them: no order of blocks changes a bit."""

import pytest
import torch

from flex_inductor.tools import execute
from tests.marks import slow_but
from tests.support import MASKS, MODS, Sizes, attention_of, dense_of, judge, run

SIZES = Sizes(heads=2, kv_heads=1, queries=150, keys=70)
# By name: the mod, and the mask.
CALLS = {"row and column": ("position_bias", "causal"), "lane": ("bucketed_bias", "document")}
CASES = [
    (name, target, dtype)
    for name in CALLS
    for target in ("sm_80", "sm_90", "sm_100")
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def call(name, dtype):
    mod, mask = CALLS[name]
    captures = MODS[mod].captures(SIZES)
    return MODS[mod].build, SIZES.inputs(dtype), captures, MASKS[mask](SIZES)


@pytest.mark.parametrize("case", slow_but(CASES, ("row and column", "sm_90", torch.bfloat16)), ids=str)
def test_the_order_of_blocks_does_not_matter(case, deterministic):
    name, target, dtype = case
    build, *given = call(name, dtype)
    found = []
    for seed in (0, 1):
        torch._dynamo.reset()
        launches = []
        attend = execute.compiled(attention_of(build), target, launches, seed=seed)
        found.append(judge(attend, dense_of(build), *given).named())
        kernels = [launch.kernel.name for launch in launches]
        assert sum("backward_magnitudes" in kernel for kernel in kernels) == 1, kernels
    for result, of_one_order in found[0].items():
        assert torch.equal(found[1][result], of_one_order), result


def test_without_it_the_order_shows():
    build, inputs, captures, mask = call("lane", torch.float32)
    captures = [c.float() if c.is_floating_point() else c for c in captures]
    found = []
    for seed in (0, 1):
        torch._dynamo.reset()
        attend = execute.compiled(attention_of(build), "sm_90", seed=seed)
        found.append(run(attend, inputs, captures, mask).d_captures[0])
    assert not torch.equal(*found)
