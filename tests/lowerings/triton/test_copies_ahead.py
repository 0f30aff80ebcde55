"""While tensor cores work on a tile the next ones are being copied: read from what Triton and the assembler make."""

import re

import pytest
import torch
from support import causal

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.lowerings.triton.configs import Config, Shape, misfit
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.lowerings.triton.tables import TABLES
from flex_inductor.tools.bench.static import Case
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_for, compile_untuned, machine_code, occupancy
from flex_inductor.tools.sass import LOCAL_MEMORY, main_loops

# Copies that may be under way when a loop waits, two tiles ahead: keys and values, or queries, gradients of the output
# and two numbers a row of each. Torch's kernels for the same calls have as many, or fewer.
AHEAD = {"forward": 2, "backward_dq": 2, "backward_dkdv": 4, "backward_dk": 4, "backward_dv": 3}

# Barriers of a step: for the copies that have come, and before the next may overwrite what was read. On sm_80 a product
# that is wider than it has rows is divided by columns, so what it multiplies is exchanged.
EXCHANGING = {"forward": 9, "backward_dq": 4, "backward_dkdv": 6, "backward_dk": 4, "backward_dv": 4}


def waits(ttgir):
    """How many copies may be under way at each wait, in each loop with products."""
    found, open_loops = [], []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            open_loops.append((indent, [], []))
        elif open_loops and line.strip().startswith("}") and indent <= open_loops[-1][0]:
            _, counts, products = open_loops.pop()
            if products:
                found.append(counts)
        elif open_loops:
            open_loops[-1][1].extend(map(int, re.findall(r"async_wait.*\bnum = (\d+)", line)))
            open_loops[-1][2].extend(re.findall(r"tt\.dot |warp_group_dot ", line))
    return found


def assert_ahead(compiled, copies):
    loops = waits(compiled.asm["ttgir"])
    assert len(loops) == 2 and all(counts and min(counts) >= copies for counts in loops), loops


def test_keys_and_values_are_copied_two_tiles_ahead():
    q, k, v = (torch.randn(1, 2, 256, 128, dtype=torch.bfloat16) for _ in "qkv")
    mask = create_block_mask(causal, None, None, 256, 256, "cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=mask)

    (kernel,) = attention_kernels(attend, q, k, v, target="sm_90")
    # Copies by descriptors are waited for at barriers in memory.
    compiled = compile_for(kernel, {**kernel.configs[0], "DESCRIPTORS": 0}, "sm_90")
    assert_ahead(compiled, 2)
    assert compiled.metadata.shared <= known_device("sm_90").shared_bytes


def test_captured_values_of_keys_are_copied_ahead_too():
    """Shared memory has room for one number a key beside tiles of 128, not for two."""
    found = []
    for captured in (1, 2):
        shape = Shape(128, 128, 2, line_loads=captured)
        found.append(misfit(Config(128, 128, 8, 3), TABLES["forward"][1], known_device("sm_90"), shape))
    assert found == [None, "about 233984 bytes of shared memory of 232448"]


PAGED = Sequences(
    torch.tensor([0, 200], dtype=torch.int32),
    used_k=torch.tensor([500], dtype=torch.int32),
    pages=torch.arange(64, dtype=torch.int32)[None],
    page_size=16,
)
CAUSAL_PAGED = PAGED.mask(causal)


def lengths_no_tile_divides(q, k, v):
    return flex_attention(q, k, v)


def pages(q, k, v):
    return varlen_attention(q, k, v, PAGED, block_mask=CAUSAL_PAGED)


@pytest.mark.parametrize("attend", [lengths_no_tile_divides, pages])
def test_weights_stay_in_registers_behind_a_branch_too(attend):
    """Otherwise sm_80 would lay out the two products of a step differently, and exchange the weights."""
    shapes = [(200, 2, 64), *[(64, 16, 2, 64)] * 2] if attend is pages else [(1, 2, 300, 64)] * 3
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    (kernel,) = attention_kernels(attend, q, k, v, target="sm_80")
    compiled = compile_for(kernel, kernel.configs[0], "sm_80")
    assert len(re.findall(r"^#mma\d* = ", compiled.asm["ttgir"], flags=re.MULTILINE)) == 1


def test_products_of_a_score_mod_do_not_wait_one_by_one():
    """As ptxas has them behind the branch of a length that tiles do not divide."""
    q, k, v = (torch.randn(1, 1, 301, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20))

    kernels = {kind(kernel): kernel for kernel in attention_kernels(attend, q, k, v, target="sm_90")}
    kernel = kernels["backward_dq"]
    (loop,) = main_loops(machine_code(compile_for(kernel, kernel.configs[0], "sm_90")))
    assert sum(i.matches("WARPGROUP.DEPBAR") for i in loop) < sum(i.matches("HGMMA") for i in loop) / 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["causal", "softcap", "documents", "bias"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_default_configs_copy_ahead(target, head_dim, variant):
    for kernel in Case(variant, head_dim, target).kernels():
        name = kind(kernel)
        config, compiled, found = compile_untuned(kernel, target)
        assert found.shared_bytes <= known_device(target).shared_bytes, name
        if target == "sm_90" and config["num_warps"] == 4:  # while one instance waits, the other works
            assert occupancy(found, 4, target).instances >= 2, name
            assert found.spill_bytes <= known_device(target).few_spilled, name
            continue
        loops = main_loops(machine_code(compiled))
        assert not any(i.matches(LOCAL_MEMORY) for loop in loops for i in loop), name
        # What these mods keep for the gradient leaves no registers or memory for a tile of which three stages fit.
        kept = ("softcap", "bias") if target == "sm_80" else ("bias",)
        if (name, head_dim) != ("backward_dq", 256) or variant not in kept:
            assert_ahead(compiled, AHEAD[name])
            exchanged = target == "sm_80" and (head_dim == 256 or name == "backward_dkdv")
            most = EXCHANGING[name] if exchanged else 2
            if "COALESCED" in config:  # each of its additions passes shared memory
                continue
            assert max(sum(i.matches("BAR") for i in loop) for loop in loops) <= most, name
