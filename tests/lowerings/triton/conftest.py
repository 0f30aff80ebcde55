import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Generated code gets its buffers full of NaN: what a kernel leaves out shows."""
    guards = torch._C._dynamo.guards
    unfilled = guards._empty_strided_cpu

    def empty_strided_cpu(size, stride, dtype):
        buffer = unfilled(size, stride, dtype)
        return buffer.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)

    monkeypatch.setattr(guards, "_empty_strided_cpu", empty_strided_cpu)
    torch._dynamo.reset()
