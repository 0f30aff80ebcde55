"""What a kernel does on a card with fewer resources than its config takes. Stand-ins take the place of the compiler and the loader."""

import copy
import functools
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.runtime.triton_heuristics as heuristics
import triton
from torch._inductor.codecache import PyCodeCache

from flex_inductor import FlexError, flex_attention
from flex_inductor.tools.inspector import attention_kernels


@functools.cache
def source(**hints):
    """A forward's name and generated module."""
    q = torch.randn(1, 2, 256, 64, dtype=torch.float16)
    (kernel,) = attention_kernels(flex_attention, q, q, q, target="sm_80", kernel_options=hints or None)
    return kernel.name, kernel.source


def autotuner(**hints):
    """Inductor's own for a forward, as its generated module makes it and another process hands it on."""
    name, text = source(**hints)
    made = copy.copy(getattr(PyCodeCache.load(text), name))
    left_out = made.prepare_for_pickle()
    received = pickle.loads(pickle.dumps(made))
    made.restore_after_unpickle(left_out)
    received._reload_kernel = lambda: made
    return received


@pytest.fixture
def card(monkeypatch):
    """A GPU that can run what is in the set that this gives, without local memory."""
    runs = set()

    def load(self):
        assert not self.launchers
        found = [result for result in self.compile_results if result.config.kwargs["BLOCK_M"] in runs]
        if not found:
            raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory")
        self.launchers = found

    def compile_(self, config):
        return types.SimpleNamespace(config=config, kernel=None, n_spills=0)

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", compile_)
    monkeypatch.setattr(heuristics.CachingAutotuner, "_make_launchers", load)
    return runs


def launched(kernel):
    kernel._precompile_worker()
    kernel._make_launchers()
    (launcher,) = kernel.launchers
    return launcher.config


def test_the_next_config_that_runs_is_taken(card, caplog):
    card |= {64, 16}
    kernel = autotuner()
    config = launched(kernel)
    assert {**config.kwargs, "num_stages": config.num_stages} == {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "num_stages": 3,
    }
    assert heuristics.GridExpr.from_meta(kernel.inductor_meta, config).eval_slow({}) == (4, 2, 1)
    assert (
        "128x128, 8 warps, 2 stages: OutOfResources: out of resource: shared memory; next: 128x64"
        in caplog.text
    )


def test_the_error_names_all_that_was_tried(card):
    with pytest.raises(FlexError) as error:
        launched(autotuner())
    lines = str(error.value).splitlines()
    assert lines[0] == "no config of the kernel 'forward' can run on this GPU. Tried:"
    assert lines[1] == "  128x128, 8 warps, 3 stages: OutOfResources: out of resource: shared memory"
    assert lines[-2].startswith("  16x16, 4 warps, 1 stages: ") and len(lines) == 11


def test_a_config_that_the_compiler_gives_up_on_is_left_too(card, monkeypatch, caplog):
    card |= {64}
    compile_ = heuristics.CachingAutotuner._precompile_config

    def broken(self, config):
        if config.kwargs["BLOCK_M"] == 128:
            raise RuntimeError("PassManager::run failed")
        return compile_(self, config)

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", broken)
    assert launched(autotuner()).kwargs["BLOCK_M"] == 64
    assert "128x128, 8 warps, 2 stages: CompilerGaveUp: PassManager::run failed; next: 128x64" in caplog.text


def tiles(config):
    return config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]


@pytest.fixture
def spills(card, monkeypatch):
    """Registers of four bytes that this card spills with a tile."""
    card |= {128, 64}
    counts = {}

    def compile_(self, config):
        return types.SimpleNamespace(config=config, kernel=None, n_spills=counts.get(tiles(config), 0))

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", compile_)
    return counts


def test_a_config_without_registers_for_all_is_left_for_one_with(spills, caplog):
    spills[128, 128] = 5
    with caplog.at_level("INFO", logger="flex_inductor"):
        assert tiles(launched(autotuner())) == (128, 64)
    assert "128x128, 8 warps, 3 stages: 20 bytes of local memory; next: 128x64" in caplog.text


def test_the_one_with_the_least_local_memory_is_kept_if_all_have_some(spills):
    spills |= {(128, 128): 6, (128, 64): 9}
    kernel = autotuner()
    config = launched(kernel)
    assert tiles(config) == (128, 128)
    assert [result.config for result in kernel.compile_results] == [config]


def test_a_little_local_memory_goes_unnoticed(spills):
    spills[128, 128] = 4
    assert tiles(launched(autotuner())) == (128, 128)


def test_on_hopper_more_of_it_goes_unnoticed(spills):
    for words, kept in ((32, (128, 128)), (33, (128, 64))):
        spills[128, 128] = words
        kernel = autotuner()
        kernel.device_props = kernel.device_props._replace(cc=90)
        assert tiles(launched(kernel)) == kept


def test_one_that_cannot_run_is_no_better(spills, card, monkeypatch):
    card -= {64}
    spills |= {(128, 128): 6, (128, 64): 9}
    assert tiles(launched(autotuner())) == (128, 128)


def test_a_hint_is_not_left(spills):
    spills[128, 128] = 50
    assert tiles(launched(autotuner(BLOCK_N=128, num_warps=4))) == (128, 128)


def test_other_errors_are_left_alone(card, monkeypatch):
    def broken(self, config):
        raise NotImplementedError("no such device")

    monkeypatch.setattr(heuristics.CachingAutotuner, "_precompile_config", broken)
    with pytest.raises(NotImplementedError, match="no such device"):
        launched(autotuner())


def test_descriptors_have_memory_in_every_thread(monkeypatch):
    def run(self, *_args, **_kwargs):
        return triton.runtime._allocation._allocator.get()(64, 16, None)

    monkeypatch.setattr(heuristics.CachingAutotuner, "run", run)
    kernel = autotuner()
    kernel.inductor_meta = {**kernel.inductor_meta, "declared_constexpr_names": ["DESCRIPTORS"]}
    kernel.device_props = types.SimpleNamespace(type="cpu")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(kernel.run, stream=0).result().nbytes == 64
