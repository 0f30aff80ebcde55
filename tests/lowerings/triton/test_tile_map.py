"""Kernels whose tiles lie where a map says: compiled for a GPU that is not there, and what they refuse."""

import pytest
import torch
import triton
from support import causal

import flex_inductor
from flex_inductor import FlexError, Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.op import attention
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_untuned
from tests.tile_maps import Part, packed

STACK = 16 if triton.__version__ < "3.7" else 0  # bytes outside of loops, at D128
PARTS = [Part(300, 300), Part(130, 200, 70), Part(1, 400, 399)]


def report(
    blocks=(128, 128),
    head_dim=64,
    biased=True,
    parts=PARTS,
    requires_grad=False,
    options=None,
    target="sm_90",
):
    inputs, _ = packed(causal, parts, blocks)
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

    return flex_inductor.inspect(attend, q, k, v, target=target, options=options)


@pytest.mark.parametrize("head_dim, biased", [(64, True), pytest.param(128, False, marks=pytest.mark.slow)])
def test_little_local_memory_on_sm_90(head_dim, biased):
    kernels = report(head_dim=head_dim, biased=biased, requires_grad=True).kernels
    assert sorted(kernel.kind for kernel in kernels) == ["backward_dkdv", "backward_dq", "forward"]
    assert all(kernel.resources.spill_bytes <= known_device("sm_90").few_spilled for kernel in kernels)
    # Lengths in memory say nothing of the indices: what they find is checked.
    assert all(("< 2048" in kernel.made.triton.source) == biased for kernel in kernels)


@pytest.mark.slow
def test_sums_of_keys_and_values_need_no_local_memory_on_sm_100():
    """They leave tensor memory after every run of a map's tiles."""
    kernels = report(head_dim=128, biased=False, requires_grad=True, target="sm_100").kernels
    (found,) = (kernel for kernel in kernels if kernel.kind == "backward_dkdv")
    assert found.resources.spill_bytes <= STACK


def test_few_queries_are_decoded_in_tiles_of_any_size():
    kernels = report((3, 64), parts=[Part(1, 1000, 999)] * 4).kernels
    assert [(kernel.kind, kernel.resources.spill_bytes) for kernel in kernels] == [
        ("decode", 0),
        ("combine", 0),
    ]


@pytest.mark.parametrize(
    "blocks, configs, reason",
    [
        ((128, 128), {"forward": {"descriptors": 1}}, "descriptors are not for tiles that lie where a map says"),
        ((16, 64), {"forward": {"block_m": 32}}, "a tile of 32 does not divide the schedule's query blocks of 16"),
        ((100, 64), None, "schedule blocks of 100x64, which are not multiples of 16"),
        ((5, 40), None, "schedule blocks of 5x40, which are not multiples of 16"),
    ],
)  # fmt: skip
def test_what_a_map_rules_out(blocks, configs, reason):
    with pytest.raises(FlexError, match="route 'triton' was asked for") as error:
        report(blocks, options={"route": "triton", "configs": configs})
    assert reason in str(error.value)


def full_loops(attend, *tensors, target="sm_90", options=None):
    """Of each kernel its tile, and the main loop over full ones."""
    found = {}
    for kernel in attention_kernels(attend, *tensors, target=target, options=options):
        config, _, needed = compile_untuned(kernel, target)
        assert needed.shared_bytes <= known_device(target).shared_bytes
        assert len(needed.loops) == 2 and needed.spill_bytes <= known_device(target).few_spilled
        assert not needed.loops[1].local
        found[kind(kernel)] = (config["BLOCK_M"], config["BLOCK_N"]), needed.loops[1]
    return found


@pytest.mark.parametrize(
    "target, head_dim",
    [
        ("sm_90", 64),
        *(
            pytest.param(t, d, marks=pytest.mark.slow)
            for t in ("sm_80", "sm_90")
            for d in (64, 128)
            if (t, d) != ("sm_90", 64)
        ),
    ],
)
def test_full_tiles_are_those_of_a_plain_call(target, head_dim):
    """At most 5% more instructions for packed sequences and 15% for pages of 16, and as many copies under way."""
    length, batch, heads = 512, 2, 4
    rows = [
        torch.randn(batch * length, heads, head_dim, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    block_mask = create_block_mask(causal, None, None, length, length, "cpu")
    batches = [x.detach().unflatten(0, (batch, length)).transpose(1, 2).requires_grad_() for x in rows]
    without_descriptors = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 3, "descriptors": 0}
    plain = full_loops(
        lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask),
        *batches,
        target=target,
        options={"configs": {"forward": without_descriptors}} if target == "sm_90" else None,
    )

    sequences = Sequences.from_lengths([length] * batch)
    mask = sequences.mask(causal)
    packed = full_loops(
        lambda q, k, v: varlen_attention(q, k, v, sequences, block_mask=mask), *rows, target=target
    )
    assert packed.keys() == plain.keys() == {"forward", "backward_dq", "backward_dkdv"}

    pages = torch.arange(batch * length // 16, dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    paged = Sequences(sequences.cu_q, used_k=lengths, pages=pages, page_size=16)
    in_pages = paged.mask(causal)
    q, *pools = (x.detach() for x in rows)
    pools = [x.unflatten(0, (-1, 16)) for x in pools]
    of_pages = full_loops(
        lambda q, k, v: varlen_attention(q, k, v, paged, block_mask=in_pages), q, *pools, target=target
    )

    for found, most in ((packed, 1.05), (of_pages, 1.15)):
        for name, (tile, loop) in found.items():
            same, other = plain[name]
            assert tile == same and loop.instructions <= most * other.instructions, (name, loop, other)
            assert (loop.copies, loop.barriers) == (other.copies, other.barriers), (name, loop, other)


IDS = torch.arange(512) // 300


def of_document(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


@pytest.mark.slow
@pytest.mark.parametrize("mask_mod", [causal, of_document])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_full_tiles_under_bounds_take_no_more_instructions(target, mask_mod):
    tensors = [torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def loops(compact):
        mask = create_block_mask(mask_mod, None, None, 512, 512, "cpu", compact=compact)
        return full_loops(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *tensors, target=target)

    listed = loops(compact=False)
    for name, (_, loop) in loops(compact=True).items():
        other = listed[name][1]
        assert loop.instructions <= other.instructions and loop.copies == other.copies, name
