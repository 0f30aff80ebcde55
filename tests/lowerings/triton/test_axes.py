"""Tensor descriptors, and values for every score, in kernels compiled for GPUs that are not there."""

import pytest
import torch
import triton
from inspected import block_mask, causal

import flex_inductor
from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.configs import Config, launched_with
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.tools.inspector import attention_kernels
from flex_inductor.tools.resources import compile_for, machine_code
from flex_inductor.tools.sass import main_loops


def attend(q, mask):
    return flex_attention(q, q, q, block_mask=mask)


def biased(dtype, stop=None):
    """The forward with a bias for every score; with `stop` its indices have to be checked."""
    bias = torch.randn(512, dtype=dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx - kv_idx + (256 if stop is None else stop[b])]

    q = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    mask = block_mask(causal)
    (kernel,) = attention_kernels(
        lambda q: flex_attention(q, q, q, score_mod, block_mask=mask), q, target="sm_90"
    )
    return compile_for(kernel, kernel.configs[0], "sm_90")


@pytest.mark.parametrize(
    "dtype, load, checked",
    [
        (torch.float32, "f32", False),
        (torch.bfloat16, "b16", True),
        pytest.param(torch.float32, "f32", True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "b16", False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "b16", False, marks=pytest.mark.slow),
        pytest.param(torch.float16, "b16", True, marks=pytest.mark.slow),
    ],
)
def test_a_value_for_every_score_arrives_where_the_scores_are(dtype, load, checked):
    made = biased(dtype, torch.tensor([256]) if checked else None)
    assert made.asm["ptx"].count(f"ld.global.nc.{load}") >= 64
    barriers = [sum(i.matches("BAR") for i in loop) for loop in main_loops(machine_code(made))]
    assert max(barriers) == 2  # those of the copies of keys and values


def test_descriptors_copy_keys_and_values_by_tma():
    q = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    options = {"configs": {"forward": {"descriptors": 1}}}
    report = flex_inductor.inspect(attend, q, block_mask(causal), target="sm_90", options=options)
    (kernel,) = report.kernels
    assert kernel.config["DESCRIPTORS"] == 1
    made = compile_for(kernel.made.triton, kernel.made.triton.configs[0], "sm_90")
    assert any(instruction.operation.startswith("UTMALDG") for instruction in machine_code(made))
    assert kernel.resources.spill_bytes == 0
    assert kernel.resources.shared_bytes <= known_device("sm_90").shared_bytes


def test_a_launch_says_what_it_was_made_of():
    config = Config(128, 64, 8, 2, descriptors=1)
    axes = ("descriptors", "coalesced")
    launch = triton.Config(config.constants(axes), num_warps=8, num_stages=2)
    assert launched_with(launch) == config
    assert config.launch(axes) == {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "DESCRIPTORS": 1,
        "COALESCED": 0,
        "num_warps": 8,
        "num_stages": 2,
    }
