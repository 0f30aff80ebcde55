"""One rule for all kernels: what is asked for, else what won when timed, else the first that fits."""

from types import SimpleNamespace
from typing import NamedTuple

import expecttest
import pytest
import torch
from torch._inductor import config as inductor_config

from flex_inductor.lowerings import choice, winners
from flex_inductor.lowerings.decision import Decision
from flex_inductor.mod_ir.split import Programs
from flex_inductor.options import CallOptions


class Config(NamedTuple):
    block_m: int
    block_n: int


FITTING = [Config(128, 64), Config(64, 64), Config(32, 32)]
REJECTED = [(Config(256, 64), "70 KB in a cache with room for 48")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def choose(seconds=None, of_call=None, **options):
    """What is chosen, where timing gives `seconds`, and without them where nothing may be timed."""

    def time(configs):
        assert seconds is not None, "timed, though it need not be"
        if isinstance(seconds, Exception):
            raise seconds
        return [seconds[config] for config in configs]

    problem = SimpleNamespace(
        dtype=torch.float32, B=2, H=8, K=2, M=100, N=300, D=64, V=32, schedule="lists", blocks=(128, 64), map_tiles=None, inputs=(), kv_dtype=torch.float32,
        outputs=("lse",), options=CallOptions(**options), programs=Programs(), aligned=True, device=torch.device("cpu"),
    )  # fmt: skip
    vars(problem).update(of_call or {})
    (config,), made = choice.choose(
        problem, "forward", FITTING, REJECTED, "cpu AVX2", time, lambda c: f"takes {c.block_m}"
    )
    assert made.config == config._asdict()
    return made


SECONDS = dict(zip(FITTING, (0.003, 0.001, 0.002), strict=True))


class Choices(expecttest.TestCase):
    maxDiff = None

    def shown(self, made):
        return "\n".join([str(made), *(f"  {config}: {remark}" for config, remark in made.others)])

    def test_first_that_fits(self):
        self.assertExpectedInline(
            self.shown(choose()),
            """\
forward block_m=128 block_n=64 (first of 3 that fit; not timed)
  block_m=64 block_n=64: not timed; takes 64
  block_m=32 block_n=32: not timed; takes 32
  block_m=256 block_n=64: 70 KB in a cache with room for 48""",
        )

    def test_asked_for(self):
        asked = choose(configs=(("forward", (("block_n", 32),)), ("backward", (("block_m", 1),))))
        self.assertExpectedInline(self.shown(asked), """forward block_m=128 block_n=32 (asked for)""")

    @inductor_config.patch(max_autotune=True)
    def test_timed_then_remembered(self):
        self.assertExpectedInline(
            self.shown(choose(SECONDS)),
            """\
forward block_m=64 block_n=64 (fastest when timed: 1 ms)
  block_m=128 block_n=64: 3 ms
  block_m=32 block_n=32: 2 ms
  block_m=256 block_n=64: 70 KB in a cache with room for 48""",
        )
        self.assertExpectedInline(
            self.shown(choose()),
            """\
forward block_m=64 block_n=64 (fastest when timed before: 1 ms)
  block_m=128 block_n=64: 3 ms
  block_m=32 block_n=32: 2 ms
  block_m=256 block_n=64: 70 KB in a cache with room for 48""",
        )
        (path,) = winners.folder().glob("*.json")
        self.assertExpectedInline(
            winners._load(path).problem,
            """forward float32 H8:2 D64/32 B2 M128 N512 lists of 128x64 [lse] mods e3b0c44298fc1c14""",
        )

    @inductor_config.patch(max_autotune=True)
    def test_what_cannot_be_timed(self):
        made = choose(RuntimeError("index out of bounds"))
        self.assertExpectedInline(
            str(made), """forward block_m=128 block_n=64 (first that fits; not timed: index out of bounds)"""
        )
        assert not winners.folder().exists()

    @inductor_config.patch(max_autotune=True)
    def test_a_hair_faster_is_no_reason(self):
        close = dict(zip(FITTING, (0.00102, 0.001, 0.002), strict=True))
        self.assertExpectedInline(
            str(choose(close)), """forward block_m=128 block_n=64 (fastest when timed: 1.02 ms)"""
        )

    def test_in_the_decision(self):
        self.assertExpectedInline(
            str(Decision("a call", "cpu", "fused", (), ("a note",), (choose(),))),
            """\
call:     a call
chosen:   cpu (fused)
config:   forward block_m=128 block_n=64 (first of 3 that fit; not timed)
note:     a note""",
        )


def test_calls_with_other_kernels_are_timed_apart():
    others = dict(zip(FITTING, (0.001, 0.002, 0.003), strict=True))
    with inductor_config.patch(max_autotune=True):
        choose(SECONDS)
        choose(others, {"inputs": ("sinks",)})
        choose(others, {"aligned": False})
        assert choose().config == {"block_m": 64, "block_n": 64}
        assert choose(None, {"inputs": ("sinks",)}).config == {"block_m": 128, "block_n": 64}


def test_a_winner_that_no_longer_fits_is_timed_again():
    with inductor_config.patch(max_autotune=True):
        choose(SECONDS)
        (path,) = winners.folder().glob("*.json")
        path.write_text(path.read_text().replace('"block_m": 64', '"block_m": 63'))
        assert choose(SECONDS).config == {"block_m": 64, "block_n": 64}


def misfit(kernel, config):
    return "block_m is odd" if config.block_m % 2 else None


@pytest.mark.parametrize(
    "configs, reason",
    [
        ((), None),
        ((("forward", (("block_m", 2),)),), None),
        ((("backward", (("block_m", 2),)),), "has no kernel 'backward' to configure, only forward"),
        ((("forward", (("block_k", 2),)),), "configs['forward'] has no 'block_k', only block_m, block_n"),
        ((("forward", (("block_m", 3),)),), "configs['forward']: block_m is odd"),
    ],
)
def test_refusal(configs, reason):
    problem = SimpleNamespace(options=CallOptions(configs=configs))
    assert choice.refusal(problem, {"forward": FITTING[0]}, misfit) == reason
