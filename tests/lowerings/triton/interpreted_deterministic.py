"""Captured gradients under torch.use_deterministic_algorithms, in Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from marks import slow_but
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge, run, served_by
from triton.runtime import interpreter

from flex_inductor.tools import interpret

SIZES = Sizes(heads=2, kv_heads=1, queries=40, keys=50)


def whole_bias(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


def near(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[(q_idx - kv_idx).abs() % 7] * bias[q_idx % 7]


CASES = {
    "once": (MODS["alibi"], "none", []),
    "row and column": (MODS["position_bias"], "causal", ["backward_magnitudes"]),
    "lane": (MODS["bucketed_bias"], "document", ["backward_magnitudes"]),
    "once and row": (MODS["learned_temperature"], "per_head", []),
    "lane and row": (
        MODS["relative_bias"]._replace(captures=lambda s: (_normal(7),), build=near),
        "none",
        ["backward_magnitudes"],
    ),
    "each its own": (
        MODS["alibi"]._replace(captures=lambda s: (_normal(2, 2, 40, 50),), build=whole_bias),
        "per_batch",
        [],
    ),
}


def _normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def by_triton():
    with served_by("triton"):
        yield


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def backwards(monkeypatch):
    """Have the interpreter run a grid's instances in the opposite order, while it is set."""
    builder = interpreter.interpreter_builder
    set_grid_idx, switch = builder.set_grid_idx, {"on": False}

    def turned(*place):
        if switch["on"]:
            place = [size - 1 - at for size, at in zip(builder.grid_dim, place, strict=True)]
        set_grid_idx(*place)

    monkeypatch.setattr(builder, "set_grid_idx", turned)
    return switch


def floats(captures):
    return [c.float() if c.is_floating_point() else c for c in captures]


@pytest.mark.parametrize("case", slow_but(CASES, "row and column", "lane and row", "each its own"))
def test_the_order_of_instances_does_not_matter(case, deterministic, backwards, kinds):
    mod, mask, passes = CASES[case]
    mask, inputs, captures = MASKS[mask](SIZES), SIZES.inputs(torch.float32), mod.captures(SIZES)
    attend = interpret.compiled(attention_of(mod.build))
    found = judge(attend, dense_of(mod.build), inputs, captures, mask).named()
    assert sorted(kinds) == sorted(["forward", *passes, "backward_dq", "backward_dkdv"])
    backwards["on"] = True
    for name, turned in run(attend, inputs, floats(captures), mask).named().items():
        assert torch.equal(turned, found[name]), name


def test_without_it_the_order_shows(backwards):
    mod = MODS["relative_bias"]
    attend = interpret.compiled(attention_of(mod.build))
    found = []
    for backwards["on"] in (False, True):
        found.append(
            run(attend, SIZES.inputs(torch.float32), floats(mod.captures(SIZES)), None).d_captures[0]
        )
    assert not torch.equal(*found)


@pytest.mark.parametrize("factor", slow_but([1e-30, 1e30], 1e-30))
def test_contributions_of_any_size(factor, deterministic):
    sizes = Sizes(batch=1, queries=33, keys=40)
    attend = interpret.compiled(attention_of(lambda t: lambda s, b, h, m, n: s + factor * t[(m - n).abs()]))
    q, k, v = sizes.inputs(torch.float32)
    table = torch.zeros(40, requires_grad=True)
    unscaled = torch.zeros(40, requires_grad=True)
    plain = interpret.compiled(attention_of(lambda t: lambda s, b, h, m, n: s + t[(m - n).abs()]))
    (got,) = torch.autograd.grad(attend(q, k, v, (table,), None)[0].sum(), table)
    (want,) = torch.autograd.grad(plain(q, k, v, (unscaled,), None)[0].sum(), unscaled)
    torch.testing.assert_close(got / factor, want, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_not_a_number(deterministic):
    sizes = Sizes(batch=1, queries=33, keys=40)
    attend = interpret.compiled(attention_of(MODS["relative_bias"].build))
    q, k, v = sizes.inputs(torch.float32)
    (bias,) = (c.float().requires_grad_() for c in MODS["relative_bias"].captures(sizes))
    out = attend(q, k, v, (bias,), None)[0]
    (got,) = torch.autograd.grad(out, bias, torch.full_like(out, float("inf")))
    assert got.isnan().all()
