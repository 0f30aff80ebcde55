"""Which calls torch's dispatcher sees: it takes longer than a small kernel, so plain calls do without."""

import contextlib

import pytest
import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flex_inductor import flex_attention, set_eager_kernels
from flex_inductor.op import attention
from flex_inductor.reference import reference


class Seeing(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


AROUND = {
    "nothing": contextlib.nullcontext,
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
    "a dispatch mode": Seeing,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("around", AROUND)
def test_the_dispatcher_is_asked_where_it_has_a_choice(monkeypatch, around):
    asked, dispatch = [], HigherOrderOperator.dispatch

    def counted(self, *args, **kwargs):
        asked.append(self)
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(HigherOrderOperator, "dispatch", counted)
    query = torch.randn(1, 1, 8, 4, requires_grad=True)
    expected = reference(query, query, query)[0]
    with AROUND[around]():
        out = flex_attention(query, query, query)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    assert bool(asked) == (around in ("a dispatch mode", "autocast"))


def test_function_modes_see_the_op():
    query = torch.randn(1, 1, 8, 4)
    with Calls() as calls:
        flex_attention(query, query, query)
    assert attention in calls.seen


@pytest.mark.parametrize("mode", ["never", "always"])
def test_views_with_the_other_sign(mode):
    """A view may say that its values are to be negated when they are read. Inductor's graphs do not know of it."""
    pairs = torch.randn(1, 2, 24, 16, 2, requires_grad=True)

    def run(negated):
        query = torch.view_as_complex(pairs).conj().imag if negated else -pairs[..., 1]
        table = query[0, 0, :, 0]
        assert query.is_neg() == negated
        attend = flex_attention if negated else lambda *call: reference(*call)[0]
        out = attend(query, query, query, lambda s, b, h, m, n: s + table[m] * table[n])
        return out, *torch.autograd.grad(out.sin().sum(), pairs)

    before = set_eager_kernels(mode)
    try:
        for ours, right in zip(run(True), run(False), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    finally:
        set_eager_kernels(before)
