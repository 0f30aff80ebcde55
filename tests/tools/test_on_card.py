"""What tools/on_card.py hands to a card, with tools/ptx in its place."""

import pytest
import torch
from triton.compiler.compiler import CompiledKernel

from flex_inductor import flex_attention
from flex_inductor.tools import on_card, ptx
from tests.support import served_by


@pytest.fixture
def card(monkeypatch):
    """Kernels that were launched, with their arguments."""
    launches = []

    def on(kernel, grid):
        def run(*given):
            kinds = kernel.src.signature.values()
            assert len(grid) == 3 and len(given) == len(kinds)
            launches.append((kernel, given))
            taken = [value for value, kind in zip(given, kinds, strict=True) if kind != "constexpr"]
            ptx.run_compiled(kernel, grid, taken)

        return run

    monkeypatch.setattr(CompiledKernel, "__getitem__", on)
    monkeypatch.setattr(on_card, "DEVICE", "cpu")
    monkeypatch.setattr(on_card, "target", lambda: "sm_90")
    return launches


def test_a_call_and_its_gradients(card):
    query = torch.randn(1, 1, 20, 16, dtype=torch.float16, requires_grad=True)
    with served_by("triton"):
        out = on_card.compiled(flex_attention)(query, query, query)
        (found,) = torch.autograd.grad(out.sum(), query)
    want = flex_attention(query, query, query)
    torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found, *torch.autograd.grad(want.sum(), query), rtol=1e-2, atol=1e-2)
    names = {kernel.metadata.name.rpartition("_")[0] for kernel, _ in card}
    assert {"flex_inductor_backward_dq", "flex_inductor_backward_dkdv"} <= names


def test_views_share_memory_on_the_card(card):
    both = torch.arange(6.0)
    copies = on_card._Copies()
    copies.storages[both.untyped_storage().data_ptr()] = (
        torch.empty(0, dtype=torch.uint8).set_(both.untyped_storage()),
        (there := both.clone().view(torch.uint8)),
    )
    first, second = copies.of(both[1:3]), copies.of(both.view(2, 3)[1])
    first += 10
    second *= 2
    assert copies.of(3) == 3 and both.tolist() == [0, 1, 2, 3, 4, 5]
    copies.take_back()
    assert both.tolist() == [0, 11, 12, 6, 8, 10] and there.view(torch.float32).tolist() == both.tolist()
