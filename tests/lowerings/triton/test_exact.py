"""fp32 as it is, which tensor cores cannot multiply: threads do, in kernels compiled for GPUs that are not there."""

import pytest
import torch
import triton
from inspected import LENGTH, block_mask, causal
from torch._inductor.runtime.triton_heuristics import config_from_dict

from flex_inductor import compat, flex_attention
from flex_inductor.lowerings.triton.configs import Shape, candidates, launched_with
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.lowerings.triton.tables import TABLES
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_untuned, machine_code
from flex_inductor.tools.sass import LOCAL_MEMORY, loops


def kernels(target, head_dim):
    """Those of a causal call and its backward."""
    mask = block_mask(causal)
    inputs = [torch.randn(1, 2, LENGTH, head_dim, requires_grad=True) for _ in range(3)]
    found = attention_kernels(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *inputs, target=target
    )
    assert [*map(kind, found)] == ["forward", "backward_dq", "backward_dkdv"]
    return found


@pytest.mark.parametrize(
    "target, head_dim",
    [
        ("sm_80", 64),
        pytest.param("sm_90", 128, marks=pytest.mark.slow),
        pytest.param("sm_80", 128, marks=pytest.mark.slow),
        pytest.param("sm_90", 64, marks=pytest.mark.slow),
    ],
)
def test_loops_have_no_local_memory(target, head_dim):
    device, shape = known_device(target), Shape(head_dim, head_dim, 4, exact=True)
    for kernel in kernels(target, head_dim):
        table, cost = TABLES[kind(kernel)]
        first = candidates(table, cost, device, shape)[0][0]
        assert kernel.configs == [first.launch()]
        launched, compiled, found = compile_untuned(kernel, target)
        working = [loop for loop in loops(machine_code(compiled)) if any(i.matches("FFMA") for i in loop)]
        assert working and not any(i.matches(LOCAL_MEMORY) for loop in working for i in loop)
        assert found.spill_bytes <= (0 if triton.__version__.startswith("3.7") else 16)  # before its loops
        shared, _ = cost(launched_with(config_from_dict(launched)), shape, device)
        assert found.shared_bytes <= shared + 512  # which reductions take


@pytest.mark.parametrize("allowed, tile", [(False, (64, 32)), (True, (64, 64))])
def test_tensor_cores_multiply_where_tf32_is_allowed(allowed, tile, monkeypatch):
    monkeypatch.setattr(compat, "allows_tf32", lambda: allowed)
    forward, *_ = kernels("sm_80", 64)
    assert (forward.configs[0]["BLOCK_M"], forward.configs[0]["BLOCK_N"]) == tile
