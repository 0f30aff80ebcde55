"""What tuning times: tiles with every number of stages, then all axes on the fastest. The autotuner's part is played."""

import copy
import types

import pytest
import torch
import torch._inductor.runtime.triton_heuristics as heuristics
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache

from flex_inductor import flex_attention
from flex_inductor.lowerings.triton import search
from flex_inductor.lowerings.triton.configs import (
    LAST,
    Config,
    Shape,
    candidates,
    known_device,
    launched_with,
    misfit,
)
from flex_inductor.lowerings.triton.search import MOST
from flex_inductor.lowerings.triton.tables import TABLES
from flex_inductor.tools.inspector import attention_kernels


def steps(kind, arch, shape):
    """What the first step times, and all from which the second takes its configs."""
    table, cost = TABLES[kind]
    device = known_device(arch)
    fitting, rejected = candidates(table, cost, device, shape)
    tiles = search.tiles(fitting, [config for config, _ in rejected], cost, device, shape)
    return tiles, [*search.with_axes(kind, tiles, cost, device, shape)]


def test_tuning_reaches_the_largest_tile_with_three_stages_and_all_copies_by_descriptor():
    tiles, later = steps("forward", "sm_90", Shape(128, 128, 2))
    assert Config(128, 128, 8, 3) in tiles
    assert Config(128, 128, 8, 3, descriptors=1, held=1) in later
    assert Config(128, 128, 8, 2, descriptors=1, persistent=1) in later


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
def test_every_tile_is_tried_with_every_number_of_stages_that_fits(arch):
    device = known_device(arch)
    for kind, (table, cost) in TABLES.items():
        for head_dim in (64, 128, 256):
            shape = Shape(head_dim, head_dim, 2, rows=16 if kind == "decode" else None)
            rows = [c for c in candidates(table, cost, device, shape)[0] if c not in LAST]
            tiles, later = steps(kind, arch, shape)
            assert len({*tiles}) == len(tiles) <= MOST
            assert not {*tiles} & {*later} and len({*later}) == len(later)
            for config in rows:
                for stages in (1, 2) if arch == "gfx942" else (1, 2, 3, 4):
                    other = config._replace(stages=stages)
                    assert other in tiles or misfit(other, cost, device, shape), (kind, head_dim, other)


def test_tiles_that_the_estimate_of_registers_just_refuses_are_tried():
    """Compiled for causal masks they take 255 and 243, with no local memory."""
    shape = Shape(128, 128, 2)
    tiles, _ = steps("backward_dq", "sm_80", shape)
    for tried in (Config(128, 64, 8, 3), Config(64, 64, 4, 3)):
        assert tried in tiles and "registers" in misfit(
            tried, TABLES["backward_dq"][1], known_device("sm_80"), shape
        )


def test_the_second_step_has_an_end():
    shape = Shape(64, 64, 2, score_loads=1, score_adds=1)
    tiles, later = steps("forward", "sm_90", shape)
    fastest = tiles[3]
    step = search.on_the_fastest(later, fastest, lambda config: config)
    assert len(step) == MOST < len([config for config in later if config[:3] == fastest[:3]])
    alike = [config for config in later if config[:4] == fastest[:4]]
    assert step[: len(alike)] == alike  # all axes, with the stages that won


class Launcher:
    def __init__(self, config):
        self.config, self.n_spills = config, 0


@pytest.fixture
def kernel(monkeypatch):
    """A forward for sm_90 with max-autotune, as its generated module makes it, and what a card would take for each
    config."""
    seconds = {}

    def load(self):
        self.launchers = [Launcher(result.config) for result in self.compile_results]

    def compile_(self, config):
        if launched_with(config).stages == 4:
            raise RuntimeError("PassManager::run failed")
        return types.SimpleNamespace(config=config, kernel=None)

    def time(self, *args, **kwargs):
        return {each: seconds.get(launched_with(each.config), 1.0) for each in self.launchers}

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", compile_)
    monkeypatch.setattr(heuristics.CachingAutotuner, "_make_launchers", load)
    monkeypatch.setattr(heuristics.CachingAutotuner, "benchmark_all_configs", time)
    q = torch.randn(1, 2, 256, 128, dtype=torch.float16)
    with inductor_config.patch({"max_autotune": True}):
        (made,) = attention_kernels(flex_attention, q, q, q, target="sm_90")
    return copy.copy(getattr(PyCodeCache.load(made.source), made.name)), seconds


def test_axes_are_timed_on_the_fastest_tile(kernel):
    made, seconds = kernel
    plain = Config(128, 64, 8, 2)
    best = Config(128, 64, 8, 3, descriptors=1, held=1)
    seconds |= {plain: 0.5, best: 0.2, Config(128, 128, 8, 3, descriptors=1): 0.1}
    made._precompile_worker()
    made._make_launchers()
    first = [launched_with(each.config) for each in made.launchers]
    assert plain in first and all(config[4:] == plain[4:] for config in first)
    timings = made.benchmark_all_configs()
    found = {launched_with(each.config): time for each, time in timings.items()}
    assert min(found, key=found.__getitem__) == best
    assert all(config in first or config[:3] == plain[:3] for config in found)
    assert {*map(id, timings)} == {*map(id, made.launchers)}
    assert [each.config for each in made.launchers] == [result.config for result in made.compile_results]
    assert len(made.benchmark_all_configs()) == len(timings)  # once


def test_axes_are_timed_where_one_tile_is_left(kernel):
    made, _ = kernel
    made.configs = made.configs[:1]
    made._precompile_worker()
    made._make_launchers()
    found = [launched_with(each.config) for each in made.launchers]
    assert found[0] == Config(128, 128, 8, 3) and Config(128, 128, 8, 3, descriptors=1) in found
