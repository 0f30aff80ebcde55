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


@pytest.fixture
def kinds(monkeypatch):
    """The kinds of the kernels that are generated, in order."""
    from flex_inductor.lowerings.triton.kernel import KernelCall

    heuristics, found = KernelCall._heuristics, []

    def noting(call, *metas):
        found.append(call.kind)
        return heuristics(call, *metas)

    monkeypatch.setattr(KernelCall, "_heuristics", noting)
    return found
