"""What the Triton route cannot serve: asked for by name it raises with the reason, whatever else could."""

from __future__ import annotations

import re

import pytest
import torch
import torch._functorch.config as functorch_config
from support import Sizes, causal
from torch._inductor import config

import flex_inductor
from flex_inductor import BlockMask, create_block_mask, flex_attention
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.tools.environment import triton_on_cpu
from flex_inductor.tools.inspector import attention_kernels
from flex_inductor.tools.resources import compile_untuned


def without_query_lists(length):
    counts = torch.full((1, 1, length // 16), length // 16, dtype=torch.int32)
    indices = torch.arange(length // 16, dtype=torch.int32).expand(1, 1, length // 16, -1).contiguous()
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=16, seq_lengths=(length, length), compute_q_blocks=False
    )


def sorted_keys(score, b, h, q_idx, kv_idx):
    return score + torch.stack([q_idx, kv_idx]).max()


def _never_loaded(name, source):
    """In place of a kernel of the forward: the backward is refused before it would run."""


def refused(
    message, sizes=None, dtype=torch.float32, backward=False, cpu_backend="triton", configs=None, **call
):
    sizes = sizes or Sizes(queries=64, keys=64)
    inputs = [tensor.requires_grad_(backward) for tensor in sizes.inputs(dtype)]
    torch._dynamo.reset()
    attend = torch.compile(
        flex_attention, backend="flex_inductor", options={"route": "triton", "configs": configs}
    )
    with (
        triton_on_cpu(_never_loaded),
        config.patch(cpu_backend=cpu_backend),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        pytest.raises(Exception) as error,
    ):
        attend(*inputs, enable_gqa=True, **call)
    assert "route 'triton' was asked for and cannot serve this call" in str(error.value)
    assert re.search(r"\nrejected: triton: (.*)\n", str(error.value))[1] == message


def test_a_cpu_without_the_interpreter():
    refused("for GPUs; on CPU only with Triton's interpreter", cpu_backend="cpp")


def test_dtypes():
    refused("no float64; float16, bfloat16 and float32 only", dtype=torch.float64)


def test_empty_tensors():
    refused("an empty tensor", Sizes(queries=0))


@pytest.mark.parametrize("compact", [False, True], ids=["lists", "runs"])
def test_block_sizes(compact):
    mask = create_block_mask(causal, None, None, 64, 64, "cpu", (24, 32), compact=compact)
    refused("schedule blocks of 24x32, which are not multiples of 16", block_mask=mask)


def test_gradients_of_keys_without_lists_of_queries():
    reason = "a BlockMask made without lists of queries for each KV block (compute_q_blocks=False)"
    refused(reason, block_mask=without_query_lists(64), backward=True)


def test_mods_that_compute_tensors():
    refused("score_mod computes a tensor for each score (aten.unsqueeze.default)", score_mod=sorted_keys)


@pytest.mark.parametrize(
    "configs, message",
    [
        (
            {"backward": {"block_m": 64}},
            "has no kernel 'backward' to configure, only forward, decode, backward_dq, backward_magnitudes, "
            "backward_dkdv, backward_dk, backward_dv",
        ),
        (
            {"forward": {"rows": 64}},
            "configs['forward'] has no 'rows', only block_m, block_n, warps, stages, descriptors, coalesced",
        ),
        ({"forward": {"descriptors": 2}}, "configs['forward']: descriptors is 0 or 1, not 2"),
        ({"decode": {"descriptors": 1}}, "configs['decode']: the kernel has no choice of descriptors"),
        ({"forward": {"coalesced": 1}}, "configs['forward']: the kernel has no choice of coalesced"),
        (
            {"forward": {"block_m": 48}},
            "configs['forward']: a tile of 48 is not a power of two from 16 to 256",
        ),
        ({"decode": {"block_m": 64}}, "configs['decode']: block_m is set by the number of queries"),
    ],
)
def test_configs_asked_for(configs, message):
    refused(message, configs=configs)


def test_descriptors_of_rows_that_are_not_aligned():
    message = "configs['forward']: descriptors need rows of whole, contiguous units of 16 bytes"
    refused(message, Sizes(queries=64, keys=64, value_dim=6), configs={"forward": {"descriptors": 1}})


@pytest.mark.parametrize(
    "target, kernel, requires_grad",
    [("sm_86", "forward", False), ("sm_120", "forward", False), ("sm_90", "backward_dq", True)],
)
def test_a_call_that_fits_nowhere_takes_the_next_route(target, kernel, requires_grad):
    """It would fail at its first launch."""
    q = torch.randn(1, 1, 256, 1024, requires_grad=requires_grad)
    (call,) = flex_inductor.inspect(flex_attention, q, q, q, target=target).calls
    decision = call.lowered["backward" if requires_grad else "forward"].decision
    assert decision.chosen == "chunked"
    reason = dict(decision.rejected)["triton"]
    assert reason.startswith(f"{kernel}: about ") and reason.endswith(", and no tile takes less")


def test_wide_heads_fit_amds_cards():
    q = torch.randn(1, 1, 256, 1024, dtype=torch.bfloat16)
    (kernel,) = flex_inductor.inspect(flex_attention, q, q, q, target="gfx942").kernels
    assert kernel.resources.shared_bytes <= known_device("gfx942").shared_bytes


def test_products_of_16_bits_have_a_precision_that_every_card_knows():
    """gfx950 refuses to compile "tf32"."""
    q = torch.randn(1, 1, 256, 64, dtype=torch.bfloat16)
    (kernel,) = attention_kernels(flex_attention, q, q, q, target="gfx950", backward=False)
    assert "input_precision='ieee'" in kernel.source
    assert compile_untuned(kernel, "gfx950")[2].spill_bytes == 0
