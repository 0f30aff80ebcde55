"""What an observer of the lowerings is told, and what it changes."""

import threading

import pytest
import torch

from flex_inductor import decisions, flex_attention
from flex_inductor.lowerings import record_file
from flex_inductor.lowerings.observing import Observer, observed_by
from flex_inductor.lowerings.triton.device import current_device, known_device


class Noting(Observer):
    def __init__(self, records):
        self.records, self.told = records, []

    def lowered(self, call, problem, decision, operations):
        self.told.append((problem.direction, decision.chosen, len(operations) > 0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def attend():
    """Compile and run a call, and its backward."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="flex_inductor", options={"route": "chunked"})
    inputs = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(*inputs).sum().backward()


@pytest.mark.parametrize("records", [True, False])
def test_it_is_told_what_is_lowered(records):
    decisions(clear=True)
    with observed_by(noting := Noting(records)):
        attend()
    assert noting.told == [("forward", "chunked", True), ("backward", "chunked", True)]
    kept = ["forward", "backward"] if records else []
    assert [decision.call.split()[0] for decision in decisions()] == kept
    assert record_file.path().exists() == records


def test_it_is_told_of_its_own_thread_alone():
    with observed_by(noting := Noting(records=False)):
        decisions(clear=True)
        other = threading.Thread(target=attend)
        other.start()
        other.join()
    assert not noting.told and len(decisions()) == 2


def test_kernels_for_another_device():
    there = Observer()
    there.target = "sm_90"
    cpu = torch.device("cpu")
    with observed_by(there):
        assert current_device(cpu) == known_device("sm_90")
    assert current_device(cpu).arch == "interpreter"
