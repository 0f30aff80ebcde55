"""Gradients of captured tensors through the fused CPU backward, however they are indexed."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code

from flex_inductor import create_block_mask, flex_attention, masks
from flex_inductor.lowerings.cpu import backward
from tests.lowerings.cpu.helpers import fused
from tests.support import Sizes, attention_of, causal, dense_of, judge

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=90, head_dim=16, value_dim=8)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


MODS = {
    # Every way for a leaf to be summed before it is added: over rows, columns, both and neither.
    "mixed": (
        (normal(4), normal(90), normal(70), normal(5), normal()),
        lambda slope, key, query, cycle, factor: (
            lambda score, b, h, q_idx, kv_idx: (
                torch.maximum(score, 0.5 * score)
                + slope[h] * torch.sin(kv_idx * 1.0)
                + key[kv_idx] * score
                + query[q_idx] * torch.cos(kv_idx * 0.1)
                + cycle[(q_idx * kv_idx) % 5] * factor
            )
        ),
    ),
    "dense": (
        (normal(2, 4, 70, 90),),
        lambda bias: lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx],
    ),
    "nested and repeated": (
        (normal(3, 4), torch.arange(90) % 4),
        lambda table, to: (
            lambda score, b, h, q_idx, kv_idx: score * table[1, to[kv_idx]] + table[b][to[q_idx]] ** 2
        ),
    ),
    "prologue and epilogue": (
        (normal(6), normal(90)),
        lambda table, key: (
            lambda score, b, h, q_idx, kv_idx: (
                score * table.exp().sum() * 0.1
                + (key * 2)[kv_idx]
                + table.softmax(0)[kv_idx % 6]
                + torch.stack([table, -table])[1, q_idx % 6]
                + torch.outer(table, table).diagonal()[kv_idx % 6] * torch.cos(q_idx * 1.0)
                + torch.diagonal_scatter(torch.ones(6, 6), table.detach())[kv_idx % 6, q_idx % 6]
                + torch.diagonal_scatter(key.detach()[:36].view(6, 6), table.detach())[q_idx % 6, kv_idx % 6]
            )
        ),
    ),
    "negative": (
        (normal(160),),
        lambda bias: lambda score, b, h, q_idx, kv_idx: score + bias[q_idx - kv_idx],
    ),
}


@pytest.mark.parametrize(
    "name, masked",
    [
        pytest.param(name, masked, marks=() if masked == (i % 2 == 0) else pytest.mark.slow)
        for i, name in enumerate(MODS)
        for masked in (False, True)
    ],
)
def test_captured(name, masked):
    captures, build = MODS[name]
    mask = create_block_mask(causal, None, None, 70, 90, device="cpu", BLOCK_SIZE=32) if masked else None
    attend = fused(attention_of(build), dynamic=False)
    judge(attend, dense_of(build), SIZES.inputs(torch.float32), captures, mask)


def test_windows():
    """What lies beside a window is left out within blocks too, of either side."""

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= 37) & (kv_idx < q_idx + 22) & ((q_idx + kv_idx) % 3 != 1)

    sizes = SIZES._replace(queries=200, keys=230)
    mask = create_block_mask(window, None, None, 200, 230, device="cpu")
    captures, build = MODS["prologue and epilogue"]
    inputs = sizes.inputs(torch.float32)
    judge(
        fused(attention_of(build), dynamic=False), dense_of(build), inputs, (captures[0], normal(230)), mask
    )


def test_pointwise_neighbours():
    """Sums and products around two kernels, gradients that are added up among them, stay outside of both."""

    def attend(query, key, value):
        return flex_attention(flex_attention(query * 2, key, value).tanh(), key, value * 3)

    inputs = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    grads = torch.autograd.grad(fused(attend, dynamic=False)(*inputs).square().sum(), inputs)
    wanted = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "name, leaf_bytes",
    [
        ("negative", 1),
        pytest.param("dense", 1, marks=pytest.mark.slow),
        pytest.param("negative", 1 << 10, marks=pytest.mark.slow),
    ],
)
def test_leaves_too_large_for_slots(monkeypatch, name, leaf_bytes):
    """Heads share one slot where each has its own part of it; others have two slots at least."""
    monkeypatch.setattr(backward, "LEAF_BYTES", leaf_bytes)
    captures, build = MODS[name]
    with torch._inductor.config.patch(force_disable_caches=True):
        attend = fused(attention_of(build), dynamic=False)
        judge(attend, dense_of(build), SIZES.inputs(torch.float32), captures, None)


@pytest.mark.parametrize(
    "head, apart", [(lambda h: h, True), (lambda h: h // 2, False), (lambda h: h * 0, False)]
)
def test_a_slot_is_shared_only_by_heads_that_keep_apart(head, apart, unbuilt):
    """Heads that meet in a leaf must not add to one slot from several threads."""
    inputs, table = SIZES.inputs(torch.float32), torch.randn(4, 90, requires_grad=True)
    build = lambda table: lambda score, b, h, q_idx, kv_idx: score + table[head(h), kv_idx]  # noqa: E731
    attend = fused(attention_of(build), dynamic=False)
    _, codes = run_fw_bw_and_get_code(lambda: attend(*inputs, (table,), None)[0])
    expected = "slots_that_fit < PARTS" if apart else "false"
    assert f"const bool leaf_by_head = {expected};" in codes[1]


@pytest.mark.parametrize("wanted", [0, 2, 3])
def test_what_is_not_wanted_is_not_computed(wanted):
    tensors = [*SIZES.inputs(torch.float32), torch.randn(90)]
    build = lambda bias: lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]  # noqa: E731
    attend = attention_of(build)

    def gradients(function, which):
        inputs = [t.detach().requires_grad_(i in which) for i, t in enumerate(tensors)]
        out, _, _ = function(*inputs[:3], (inputs[3],), None)
        return torch.autograd.grad(out.square().sum(), [inputs[i] for i in which])

    (alone,) = gradients(fused(attend), [wanted])
    expected = gradients(attend, range(4))[wanted]
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)


def test_results_larger_than_the_caches():
    """They are written past the caches where a row begins with a line of these; those of a quarter are not."""
    attend = fused(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), dynamic=True)
    mask = create_block_mask(masks.sliding_window(16), None, None, 4096, 4096, device="cpu")

    def step(*given):
        inputs = [tensor.detach().requires_grad_() for tensor in given[:3]]
        out = attend(*inputs, mask)
        return out.detach(), *torch.autograd.grad(out, inputs, given[3])

    given = [torch.randn(8, 4, 4096, 72) for _ in range(4)]
    whole = step(*given)
    quarters = [step(*tensors) for tensors in zip(*(tensor.split(2) for tensor in given), strict=True)]
    assert whole[0].nbytes >= 32 << 20 > sum(tensor.nbytes for tensor in quarters[0][1:])
    for result, *parts in zip(whole, *quarters, strict=True):
        torch.testing.assert_close(result, torch.cat(parts))
