import pytest

from flex_inductor.op.eager import chunked


def _wrong(tensor):
    return tensor.fill_(float("nan") if tensor.is_floating_point() else -99)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What a kernel forgets to write is NaN."""
    unfilled = chunked.empty_like_layout, chunked.empty_outputs
    monkeypatch.setattr(chunked, "empty_like_layout", lambda *args: _wrong(unfilled[0](*args)))
    monkeypatch.setattr(chunked, "empty_outputs", lambda *args: tuple(map(_wrong, unfilled[1](*args))))
