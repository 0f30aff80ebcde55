"""Tensor descriptors, persistent instances and specialized warps, in kernels compiled for GPUs that are not there."""

import types

import pytest
import torch
import triton
from inspected import block_mask, causal

import flex_inductor
from flex_inductor import flex_attention
from flex_inductor.lowerings.triton import persistent
from flex_inductor.lowerings.triton.configs import (
    STACK_BYTES,
    Config,
    Shape,
    axes_of,
    candidates,
    known_device,
    launched_with,
)
from flex_inductor.lowerings.triton.search import with_axes
from flex_inductor.lowerings.triton.tables import TABLES
from flex_inductor.tools.resources import compile_for, machine_code
from flex_inductor.tools.sass import main_loops


def attend(q, mask):
    return flex_attention(q, q, q, block_mask=mask)


def compiled(kind, target, head_dim=128, **axes):
    """The kernel as it is with these axes: Triton's result, and what it takes."""
    q = torch.randn(1, 2, 256, head_dim, dtype=torch.bfloat16, requires_grad=kind.startswith("backward"))
    options = {"configs": {kind: axes}}
    report = flex_inductor.inspect(attend, q, block_mask(causal), target=target, options=options)
    (kernel,) = (kernel for kernel in report.kernels if kernel.kind == kind)
    made = kernel.made.triton
    assert all(made.configs[0][axis.upper()] for axis in axes)
    return compile_for(made, made.configs[0], target), kernel.resources


def biased(dtype, stop=None, **axes):
    """The forward with a bias for every score; with `stop` its indices have to be checked."""
    bias = torch.randn(512, dtype=dtype)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx - kv_idx + (256 if stop is None else stop[b])]

    q = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    options = {"configs": {"forward": axes}} if axes else None
    mask = block_mask(causal)
    report = flex_inductor.inspect(
        lambda q: flex_attention(q, q, q, score_mod, block_mask=mask), q, target="sm_90", options=options
    )
    (kernel,) = report.kernels
    return compile_for(kernel.made.triton, kernel.made.triton.configs[0], "sm_90")


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
    stop = torch.tensor([256]) if checked else None
    straight, staged = biased(dtype, stop), biased(dtype, stop, staged=1)
    loads = [text.asm["ptx"].count(f"ld.global.nc.{load}") for text in (straight, staged)]
    assert loads[0] >= 64 and loads[1] == 0
    found = [
        [sum(i.matches("BAR") for i in loop) for loop in main_loops(machine_code(made))]
        for made in (straight, staged)
    ]
    assert max(found[0]) == 2 and min(found[1]) > 2, found


def operations(result):
    return {instruction.operation.split(".")[0] for instruction in machine_code(result)}


@pytest.mark.parametrize("kind", ["forward", "backward_dq", "backward_dkdv"])
def test_descriptors_copy_tiles_by_tma(kind):
    result, taken = compiled(kind, "sm_90", 64, descriptors=1)
    assert "UTMALDG" in operations(result)
    assert taken.spill_bytes == 0 and taken.shared_bytes <= known_device("sm_90").shared_bytes


def test_queries_are_copied_by_tma_too():
    result, taken = compiled("forward", "sm_90", descriptors=1, held=1)
    plain, _ = compiled("forward", "sm_90", descriptors=1)
    copies, fewer = (
        sum(instruction.operation.startswith("UTMALDG") for instruction in machine_code(made))
        for made in (result, plain)
    )
    assert copies > fewer
    assert taken.spill_bytes == 0


def test_one_pass_adds_to_the_queries_gradient_by_tma():
    result, taken = compiled("backward_onepass", "sm_90", 64, descriptors=1)
    assert "UTMAREDG" in operations(result)
    assert taken.spill_bytes == 0


def test_persistent_instances_take_tiles_from_a_counter():
    result, taken = compiled("forward", "sm_80", 64, persistent=1)
    assert operations(result) & {"ATOMG", "ATOM"}
    assert taken.spill_bytes == 0


@pytest.mark.parametrize("left", ["none yet", "both", "plain", "persistent"])
def test_rows_are_sorted_while_persistent_instances_may_run(left):
    loaded = [
        types.SimpleNamespace(
            config=triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "PERSISTENT": on}, num_warps=4)
        )
        for on in (0, 1)
    ]
    launchers = {"none yet": [], "both": loaded, "plain": loaded[:1], "persistent": loaded[1:]}[left]
    taken, order = (torch.full(size, 7, dtype=torch.int32) for size in ([1], [1, 1, 3]))
    partial, full = (torch.tensor([[counts]], dtype=torch.int32) for counts in ([1, 1, 1], [0, 5, 2]))
    kernel = types.SimpleNamespace(launchers=launchers)
    persistent.fill_if_used(kernel, "lists", taken, order, partial, partial, full, full)
    sorted_ = left != "plain"
    assert (taken.item(), order.flatten().tolist()) == ((0, [1, 2, 0]) if sorted_ else (7, [7, 7, 7]))


def test_persistent_instances_with_descriptors():
    result, taken = compiled("forward", "sm_90", descriptors=1, persistent=1)
    assert {"UTMALDG", "ATOMG"} <= operations(result)
    assert taken.spill_bytes == 0


@pytest.mark.parametrize("kind", ["forward", "backward_dq", "backward_dkdv"])
def test_warps_are_specialized(kind):
    result, taken = compiled(kind, "sm_100", descriptors=1, specialized=1)
    assert "ttg.warp_specialize" in result.asm["ttgir"]
    assert taken.spill_bytes <= STACK_BYTES


def test_what_tuning_tries_besides_the_table():
    first, shape = Config(128, 64, 8, 2), Shape(128, 128, 2)

    def tried(kind, arch, shape):
        cost = TABLES[kind][1]
        return ["+".join(axes_of([c])) for c in with_axes(kind, [first], cost, known_device(arch), shape)]

    assert tried("forward", "sm_80", shape) == ["persistent"]
    assert tried("forward", "sm_90", shape) == [
        "descriptors",
        "persistent",
        "descriptors+persistent",
        "descriptors+held",
        "descriptors+persistent+held",
    ]
    assert tried("forward", "sm_100", shape)[5:] == ["descriptors+specialized"]
    assert tried("forward", "sm_90", shape._replace(aligned=False)) == ["persistent"]
    assert tried("backward_dq", "sm_90", shape) == ["descriptors"]
    assert tried("backward_dkdv", "sm_100", shape) == ["descriptors", "descriptors+specialized"]
    assert tried("backward_onepass", "sm_100", shape) == ["descriptors"]
    assert tried("decode", "sm_90", shape) == []
    biased = shape._replace(score_loads=1)
    assert tried("backward_dq", "sm_90", biased) == ["staged", "descriptors", "descriptors+staged"]
    adding = biased._replace(score_adds=1)
    assert len(tried("backward_dq", "sm_90", adding)) == 2**3 - 1
    table, cost = TABLES["backward_dq"]
    (best, *_), _ = candidates(table, cost, known_device("sm_100"), adding)
    others = with_axes("backward_dq", [best], cost, known_device("sm_100"), adding)
    assert best.coalesced and best._replace(coalesced=0) in others
    assert tried("decode", "sm_80", biased) == ["staged"]
    assert "staged" not in tried("forward", "gfx942", biased)


def test_a_launch_says_what_it_was_made_of():
    config = Config(128, 64, 8, 2, descriptors=1)
    axes = ("descriptors", "persistent")
    launch = triton.Config(config.constants(axes), num_warps=8, num_stages=2)
    assert launched_with(launch) == config
    assert config.launch(axes) == {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "DESCRIPTORS": 1,
        "PERSISTENT": 0,
        "num_warps": 8,
        "num_stages": 2,
    }
