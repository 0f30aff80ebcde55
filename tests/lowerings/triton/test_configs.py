"""The table's configs, what prunes them, and torch's hints."""

import pickle
import types

import expecttest
import pytest
import torch
import triton
from torch._inductor import config as inductor_config

import flex_inductor
from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.configs import Config, Shape, candidates, describe
from flex_inductor.lowerings.triton.device import Device, current_device, known_device
from flex_inductor.lowerings.triton.fitting import hinted, to_time, without_effect
from flex_inductor.lowerings.triton.tables import TABLES

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


class Reports(expecttest.TestCase):
    maxDiff = None

    def test_nothing_fits(self):
        kept, rejected = candidates(*TABLES["forward"], known_device("sm_86"), Shape(1024, 1024, 4))
        assert kept == [Config(16, 16, 4, 1)]
        self.assertExpectedInline(
            "\n".join(f"{describe(config)}: {reason}" for config, reason in rejected),
            """\
16x16, 4 warps, 1 stages: about 132352 bytes of shared memory of 101376
32x32, 4 warps, 1 stages: about 266752 bytes of shared memory of 101376
16x32, 4 warps, 1 stages: about 198912 bytes of shared memory of 101376
32x16, 4 warps, 1 stages: about 199168 bytes of shared memory of 101376""",
        )

    def test_the_first_choice_of_every_architecture(self):
        """At D64, D128 and D256 in half precision."""
        lines = []
        for arch in ("sm_80", "sm_86", "sm_90", "gfx942"):
            for kind in ("forward", "backward_dq", "backward_dkdv"):
                shapes = [Shape(D, D, 2) for D in (64, 128, 256)]
                chosen = [candidates(*TABLES[kind], known_device(arch), shape)[0][0] for shape in shapes]
                lines.append(f"{arch} {kind}: {'; '.join(map(describe, chosen))}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
sm_80 forward: 128x128, 8 warps, 3 stages; 128x64, 8 warps, 3 stages; 32x64, 4 warps, 3 stages
sm_80 backward_dq: 128x64, 8 warps, 3 stages; 128x32, 8 warps, 3 stages; 64x32, 4 warps, 3 stages
sm_80 backward_dkdv: 64x128, 8 warps, 3 stages; 32x64, 4 warps, 3 stages; 32x64, 8 warps, 1 stages
sm_86 forward: 64x64, 4 warps, 3 stages; 64x32, 4 warps, 3 stages; 64x32, 8 warps, 1 stages
sm_86 backward_dq: 64x32, 4 warps, 3 stages; 32x32, 4 warps, 3 stages; 32x32, 4 warps, 1 stages
sm_86 backward_dkdv: 32x64, 4 warps, 3 stages; 32x32, 4 warps, 3 stages; 32x32, 4 warps, 1 stages
sm_90 forward: 64x128, 4 warps, 2 stages, descriptors; 64x64, 4 warps, 3 stages, descriptors; 128x32, 8 warps, 3 stages
sm_90 backward_dq: 64x64, 4 warps, 3 stages; 128x64, 8 warps, 3 stages; 128x32, 8 warps, 3 stages
sm_90 backward_dkdv: 64x64, 4 warps, 3 stages; 64x64, 4 warps, 2 stages; 32x32, 8 warps, 1 stages
gfx942 forward: 128x64, 4 warps, 1 stages; 128x64, 4 warps, 1 stages; 64x32, 4 warps, 1 stages
gfx942 backward_dq: 128x64, 4 warps, 1 stages; 128x32, 4 warps, 1 stages; 128x16, 4 warps, 1 stages
gfx942 backward_dkdv: 32x128, 4 warps, 1 stages; 32x128, 4 warps, 1 stages; 16x16, 4 warps, 1 stages""",
        )


def test_what_is_rejected_says_why():
    _, rejected = candidates(*TABLES["forward"], known_device("sm_86"), Shape(128, 128, 4, 16, 128))
    assert [f"{describe(config)}: {reason}" for config, reason in rejected] == [
        "64x32, 4 warps, 3 stages: a tile of 64 does not divide the schedule's query blocks of 16",
        "64x64, 4 warps, 2 stages: a tile of 64 does not divide the schedule's query blocks of 16",
        "32x32, 4 warps, 3 stages: a tile of 32 does not divide the schedule's query blocks of 16",
        "32x32, 4 warps, 2 stages: a tile of 32 does not divide the schedule's query blocks of 16",
        "32x32, 4 warps, 1 stages: a tile of 32 does not divide the schedule's query blocks of 16",
        "32x16, 4 warps, 1 stages: a tile of 32 does not divide the schedule's query blocks of 16",
    ]
    _, rejected = candidates(*TABLES["forward"], known_device("sm_90"), Shape(128, 128, 4))
    assert (Config(128, 128, 8, 3), "about 459264 bytes of shared memory of 232448") in rejected


def test_two_instances_of_four_warps_have_room_with_descriptors():
    """On H200 a call that captures a number for each row took half as long again where only one had."""
    wanted = Config(64, 64, 4, 3, descriptors=1)
    for captured, first in ((0, wanted), (1, wanted._replace(descriptors=0))):
        shape = Shape(128, 128, 2, 128, 128, line_loads=2 * captured)
        (chosen, *_), rejected = candidates(*TABLES["forward"], known_device("sm_90"), shape)
        assert chosen == first
    reason = "about 116992 bytes of shared memory, which leave a multiprocessor no room for a second instance"
    assert (wanted, reason) in rejected


# What Triton 3.7.1 allocates, where estimates are closest; counts are of captured values.
DOCUMENTS = {"line_loads": 1, "score_loads": 1}
ALLOCATED = [
    ("forward", "sm_80", Config(128, 128, 8, 3), Shape(64, 64, 2, **DOCUMENTS), 83968),
    ("forward", "sm_120", Config(64, 32, 4, 3), Shape(128, 128, 2, **DOCUMENTS), 53760),
    ("forward", "sm_90", Config(128, 128, 8, 3), Shape(128, 128, 2, **DOCUMENTS), 231424),
    ("forward", "sm_100", Config(128, 64, 8, 3), Shape(64, 64, 2), 69664),
    ("forward", "sm_80", Config(64, 128, 8, 1), Shape(256, 256, 2), 114688),
    ("decode", "sm_80", Config(16, 64, 4, 3), Shape(64, 64, 4, rows=16), 73984),
    ("decode", "sm_120", Config(16, 32, 4, 3), Shape(64, 64, 2, rows=16), 19456),
    ("decode", "sm_120", Config(128, 32, 8, 2), Shape(64, 64, 2, rows=128), 32768),
    ("backward_dq", "sm_80", Config(32, 32, 4, 2), Shape(128, 128, 4), 81920),
    ("backward_dq", "sm_90", Config(128, 128, 8, 3), Shape(64, 64, 2), 131072),
    ("backward_dq", "sm_100", Config(128, 64, 8, 3, 0, 1), Shape(64, 64, 2, score_adds=1, tile_values=1, **DOCUMENTS), 99376),
    ("backward_dkdv", "sm_80", Config(32, 16, 4, 1), Shape(64, 64, 2), 16384),
    ("backward_dkdv", "sm_80", Config(64, 64, 8, 2), Shape(128, 128, 4), 180736),
    ("backward_dkdv", "sm_120", Config(32, 64, 4, 3), Shape(64, 64, 2), 33280),
    ("backward_dkdv", "sm_90", Config(64, 64, 4, 3), Shape(64, 64, 2, **DOCUMENTS), 68096),
    ("backward_dkdv", "sm_100", Config(64, 128, 8, 3), Shape(128, 128, 2), 198656),
    ("backward_dkdv", "sm_120", Config(64, 32, 4, 2), Shape(64, 64, 4, exact=True), 57856),
]  # fmt: skip


@pytest.mark.parametrize("kind, arch, config, shape, allocated", ALLOCATED)
def test_estimates_are_not_below_what_is_allocated_nor_far_above(kind, arch, config, shape, allocated):
    estimate, _ = TABLES[kind][1](config, shape, known_device(arch))
    assert allocated <= estimate <= 1.2 * allocated


@pytest.mark.parametrize(
    "arch, exact", [*((arch, False) for arch in ARCHITECTURES), ("sm_80", True), ("sm_86", True)]
)
def test_every_call_gets_a_config_that_divides_its_blocks(arch, exact):
    for kind, (table, cost) in TABLES.items():
        for head_dim in (16, 64, 128, 256, 512, 1024):
            for block in (None, 16, 48, 128):
                for loads in (0, 3):
                    shape = Shape(head_dim, head_dim, 4, block, block, loads, exact=exact)
                    kept, _ = candidates(table, cost, known_device(arch), shape)
                    tiles = (kept[0].block_n,) if kind == "decode" else kept[0][:2]
                    assert block is None or not any(block % tile for tile in tiles)


def test_hints_change_the_kernels_they_are_for():
    options = {"BLOCK_M": 32, "fwd_num_warps": 2, "bwd_BLOCK_M1": 16, "BLOCK_N2": 64, "num_warps": 8}
    config = Config(128, 128, 4, 3)
    assert hinted(config, "forward", options) == Config(32, 128, 2, 3)
    assert hinted(config, "backward_dq", options) == Config(128, 64, 8, 3)
    assert hinted(config, "backward_dkdv", options) == Config(16, 128, 8, 3)
    options = {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": False, "BLOCK_M": 64}
    assert without_effect(options) == ["PRESCALE_QK"]


def inspected(**hints):
    """The config that a forward for sm_80 gets, and what its decision notes."""
    q = torch.randn(1, 2, 256, 64, dtype=torch.float16)
    attend = types.FunctionType(_attend.__code__, globals(), closure=None, argdefs=(hints,))
    (call,) = flex_inductor.inspect(attend, q, target="sm_80").calls
    return call.kernels[0].config, call.decision.notes


def _attend(q, kernel_options=None):
    return flex_attention(q, q, q, kernel_options=kernel_options)


def test_a_hint_is_honoured_or_noted():
    config, notes = inspected(BLOCK_M=64, BLOCK_N=32, num_warps=2, num_stages=2)
    assert config == {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 2, "num_stages": 2}
    assert not notes
    config, notes = inspected(BLOCK_M=100, PRESCALE_QK=True)
    assert config["BLOCK_M"] == 128
    assert notes == (
        "forward: 100x128, 8 warps, 3 stages was asked for: a tile of 100 is not a power of two from 16 to 256",
        "PRESCALE_QK: for torch's kernels, without effect here",
    )


def test_max_autotune_gives_the_tuner_every_config_that_fits(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    device, shape = known_device("sm_80"), Shape(64, 64, 2)
    kept, rejected = candidates(*TABLES["forward"], device, shape)
    wanted = to_time("forward", kept, [config for config, _ in rejected], TABLES["forward"][1], device, shape)
    assert tuned_kernel()[0].configs == [config.launch() for config in wanted]


def tuned_kernel():
    """A forward for sm_80 with max-autotune."""
    q = torch.randn(1, 2, 256, 64, dtype=torch.float16)
    with inductor_config.patch({"max_autotune": True}):
        (kernel,) = flex_inductor.inspect(flex_attention, q, q, q, target="sm_80").kernels
    return kernel.made.triton, kernel.choice


def test_what_the_autotuner_finds_is_kept_for_the_next_process(tmp_path, monkeypatch):
    """The autotuner's part is played: it calls `save_cache_hook` with the winner and how long it took to find."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernel, choice = tuned_kernel()
    assert choice.why == f"first of {len(kernel.configs)} that fit; to be timed at the first call"
    fastest = Config(64, 64, 4, 3)
    assert fastest.launch() in kernel.configs[1:]
    hook = pickle.loads(pickle.dumps(kernel.save_cache_hook))
    hook(triton.Config(fastest.constants(), num_warps=4, num_stages=3), 1000, found_by_coordesc=False)

    kernel, choice = tuned_kernel()
    assert kernel.configs == [fastest.launch()]
    assert choice.why == "fastest when timed before" and choice.config == fastest._asdict()
    assert not hasattr(kernel, "save_cache_hook")


@pytest.mark.parametrize(
    "name, found",
    [
        ("gfx942:sramecc+", Device("gfx942", 64 << 10, 64, 38)),  # a part of a card
        ("gfx950", Device("gfx950", 160 << 10, 64, 38)),
        ("gfx1201", Device("gfx1201", 48 << 10, 32, 38)),
    ],
)
def test_a_card_of_amd_is_asked_what_it_has(monkeypatch, name, found):
    has = types.SimpleNamespace(
        gcnArchName=name, warp_size=found.warp, multi_processor_count=38, shared_memory_per_block=48 << 10
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    assert current_device(torch.device("cuda")) == found
