import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What a kernel forgets to write is NaN."""
    empty = torch._C._dynamo.guards._empty_strided_cpu

    def poisoned(size, stride, dtype):
        tensor = empty(size, stride, dtype)
        return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", poisoned)
    torch._dynamo.reset()


@pytest.fixture
def unbuilt(monkeypatch):
    """Kernels are generated and not built: they do nothing."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
