"""The machine is built once, or the error says what is missing."""

import pytest

from flex_inductor.tools.ptx import machine


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"ptx: {compiler} cannot build the machine. Install a compiler"):
        machine.machine.__wrapped__()
    assert not [*tmp_path.rglob("*.so")]
