"""Additions by assembly: what layouts allow them, and what is done where they do not."""

import copy
import dataclasses
import types

import pytest
import torch
import torch._inductor.runtime.triton_heuristics as heuristics
from inspected import block_mask, causal
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import GridExpr, config_from_dict

from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.autotuner import or_next
from flex_inductor.lowerings.triton.in_place import ADDITION, adds_once
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_untuned, machine_code
from flex_inductor.tools.sass import main_loops

HOPPER = (
    "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 64, 16]}>"
)
AMPERE = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 8]}>"
BLOCKED = (
    "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]}>"
)
LINEAR = (
    "#ttg.linear<{register = [[0, 1], [0, 2]], lane = [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]], "
    "warp = [%s], block = []}>"
)


def text(layout, rows, columns, attributes='"ttg.num-ctas" = 1 : i32', encoding="#held"):
    """A kernel's text in which a tile that lies so is added."""
    tile = f"tensor<{rows}x{columns}x%s, {encoding}>"
    types_ = ", ".join(tile % kind for kind in ("i64", "f32", "i32"))
    return (
        f"#held = {layout}\nmodule attributes {{{attributes}}} {{\n"
        f'  %0 = tt.elementwise_inline_asm "{ADDITION} [$1], $2;" %1, %2, %3 : {types_} -> {tile % "i32"} loc(#loc)\n}}\n'
    )


@pytest.mark.parametrize(
    "layout, tile, once",
    [
        (HOPPER, (128, 64), True),
        (HOPPER, (256, 128), True),
        (HOPPER, (64, 64), False),  # of rows for four warps, with eight
        (HOPPER, (128, 32), False),
        (AMPERE, (64, 16), True),
        (AMPERE, (64, 8), False),
        (AMPERE, (32, 16), False),
        (BLOCKED, (32, 16), True),
        (BLOCKED, (16, 16), False),
        (LINEAR % "[8, 0]", (16, 16), True),
        (LINEAR % "[8, 0], [0, 0]", (16, 16), False),  # two warps have the same
        ("#ttg.amd_mfma<{warpsPerCTA = [4, 1], instrShape = [32, 32]}>", (128, 32), False),
    ],
)
def test_a_layout_has_room_for_each_score_once(layout, tile, once):
    assert adds_once(text(layout, *tile)) is once


def test_what_cannot_be_read_is_not_taken_for_once():
    assert not adds_once("")
    assert not adds_once(text(HOPPER, 128, 64, '"ttg.num-ctas" = 2 : i32'))
    assert not adds_once(text(HOPPER, 128, 64) + "ttg.warp_specialize(%0)")
    assert not adds_once(text(HOPPER, 128, 64, encoding="#ttg.slice<{dim = 0, parent = #held}>"))


@pytest.fixture(scope="module")
def backward():
    """The kernel for d(query) with a learnable bias for every score."""
    bias = torch.randn(512, requires_grad=True)
    q = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = block_mask(causal)
    kernels = attention_kernels(
        lambda q, bias: flex_attention(q, q, q, lambda s, b, h, i, j: s + bias[i - j + 256], block_mask=mask),
        q,
        bias,
        target="sm_90",
    )
    found = next(kernel for kernel in kernels if kind(kernel) == "backward_dq")
    in_place = [{**config, "COALESCED": 0} for config in found.configs]
    return dataclasses.replace(found, given={**found.given, "configs": in_place}, better=[])


def test_scores_are_added_where_they_are(backward):
    config, compiled, _ = compile_untuned(backward, "sm_90")
    assert config["COALESCED"] == 0 and ADDITION in compiled.asm["ptx"]
    loops = main_loops(machine_code(compiled))
    assert len(loops) == 2 and max(sum(i.matches("BAR") for i in loop) for loop in loops) <= 4


def test_threads_that_share_scores_add_as_triton_does(backward):
    """Eight warps for a tile of two: each element is in four."""
    small = {"BLOCK_M": 16, "BLOCK_N": 16, "COALESCED": 0, "num_warps": 8, "num_stages": 1}
    kernel = dataclasses.replace(backward, given={**backward.given, "configs": [small]}, better=[])
    config, compiled, _ = compile_untuned(kernel, "sm_90")
    assert config == {**small, "COALESCED": 1}
    assert ADDITION not in compiled.asm["ptx"]


def test_an_autotuner_compiles_the_other_variant(backward, monkeypatch):
    made = getattr(PyCodeCache.load(backward.source), backward.name)
    made.configs = [config_from_dict(config) for config in backward.configs]
    asked = []

    def compile_(self, config):
        asked.append(config.kwargs["COALESCED"])
        compiled = types.SimpleNamespace(asm={"ttgir": text(HOPPER, 64, 64)})
        return types.SimpleNamespace(config=config, kernel=compiled)

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", compile_)
    made._precompile_worker()
    (result,) = made.compile_results
    assert asked == [0, 1] and result.config.kwargs["COALESCED"] == 1
    instances = GridExpr.from_meta(made.inductor_meta, result.config).eval_slow({})
    assert instances == (256 // result.config.kwargs["BLOCK_M"], 2, 1)


def test_an_autotuner_that_does_not_look_at_layouts_adds_as_triton_does(backward):
    made = copy.copy(getattr(PyCodeCache.load(backward.source), backward.name))
    made.configs, made.__class__ = [config_from_dict(backward.configs[0])], heuristics.DebugAutotuner
    assert [config.kwargs["COALESCED"] for config in or_next("backward_dq", [], False)(made).configs] == [1]
