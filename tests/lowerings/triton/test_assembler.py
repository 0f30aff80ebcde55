"""sm_90's binaries are made by the newest assembler at hand."""

import pytest

from flex_inductor.lowerings.triton.assembler import NAME, preferring_newest, use_newest, version

compiler = pytest.importorskip("triton.backends.nvidia.compiler")
knobs = pytest.importorskip("triton.knobs")


def usual(arch):
    """Triton 3.7's own choice."""
    return knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas


def test_the_newest_serves_hopper_alone(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    newest = preferring_newest(usual)
    assert newest(80) == usual(80) and newest(100) == usual(100)
    # A torch with CUDA may bring a newer one than triton's.
    assert version(newest(90)) >= max(map(version, map(usual, (90, 100))))
    assert version(newest(90)) > version(usual(90))


def test_what_a_user_asks_for_stays(monkeypatch):
    monkeypatch.setenv(NAME, usual(80).path)
    assert preferring_newest(usual)(90) == usual(80)


def test_triton_uses_it(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    use_newest()
    assert version(compiler.get_ptxas(90)) >= version(usual(100))
    assert f"V{compiler.get_ptxas(90).version}" in compiler.get_ptxas_version(90)
