"""Kernels whose tiles lie where a map says: compiled for a GPU that is not there, and what they refuse."""

import pytest
import torch
from support import causal

import flex_inductor
from flex_inductor import FlexError
from flex_inductor.op import attention
from tests.tile_maps import Part, packed

PARTS = [Part(300, 300), Part(130, 200, 70), Part(1, 400, 399)]


def report(blocks=(128, 128), head_dim=64, biased=True, parts=PARTS, requires_grad=False, options=None):
    inputs, _ = packed(causal, parts, blocks, "lists")
    bias = torch.randn(2048, requires_grad=requires_grad)
    rows, keys = (sum(lengths) for lengths in list(zip(*parts, strict=True))[:2])
    q, k, v = (
        torch.randn(1, heads, length, head_dim, dtype=torch.bfloat16, requires_grad=requires_grad)
        for heads, length in ((8, rows), (2, keys), (2, keys))
    )

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx - kv_idx + 1024]

    def attend(q, k, v):
        return attention(q, k, v, score_mod if biased else None, causal, 0.125, inputs)[0]

    return flex_inductor.inspect(attend, q, k, v, target="sm_90", options=options)


@pytest.mark.parametrize("head_dim, biased", [(64, True), pytest.param(128, False, marks=pytest.mark.slow)])
def test_no_local_memory_on_sm_90(head_dim, biased):
    kernels = report(head_dim=head_dim, biased=biased, requires_grad=True).kernels
    assert sorted((kernel.kind, kernel.resources.spill_bytes) for kernel in kernels) == [
        ("backward_dkdv", 0),
        ("backward_dq", 0),
        ("forward", 0),
    ]
    # Lengths in memory say nothing of the indices: what they find is checked.
    assert all(("< 2048" in kernel.made.triton.source) == biased for kernel in kernels)


def test_few_queries_are_decoded_in_tiles_of_any_size():
    kernels = report((3, 64), parts=[Part(1, 1000, 999)] * 4).kernels
    assert [(kernel.kind, kernel.resources.spill_bytes) for kernel in kernels] == [
        ("decode", 0),
        ("combine", 0),
    ]


@pytest.mark.parametrize(
    "blocks, configs, reason",
    [
        ((128, 128), {"forward": {"descriptors": 1}}, "descriptors is not for tiles that lie where a map says"),
        ((128, 128), {"forward": {"persistent": 1}}, "persistent is not for tiles that lie where a map says"),
        ((16, 64), {"forward": {"block_m": 32}}, "a tile of 32 does not divide the schedule's query blocks of 16"),
        ((100, 64), None, "schedule blocks of 100x64, which are not multiples of 16"),
        ((5, 40), None, "schedule blocks of 5x40, which are not multiples of 16"),
    ],
)  # fmt: skip
def test_what_a_map_rules_out(blocks, configs, reason):
    with pytest.raises(FlexError, match="route 'triton' was asked for") as error:
        report(blocks, options={"route": "triton", "configs": configs})
    assert reason in str(error.value)
