"""Compiled: one graph, fused kernels, and plans are data."""

import pytest
import torch
from torch._dynamo.utils import counters

from flex_inductor import create_block_mask, decisions, flex_attention, inspect
from flex_inductor.distributed.context import context_parallel
from flex_inductor.lowerings.decision import Decision
from tests.memory import peak_allocated

LENGTH = 256


def documents(seed):
    ends = torch.randint(0, LENGTH, (3 + 2 * seed,), generator=torch.Generator().manual_seed(seed))
    ids = (torch.arange(LENGTH)[:, None] >= ends).sum(1)
    return create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
        None,
        None,
        LENGTH,
        LENGTH,
        "cpu",
        16,
        compact=True,
    )


def layer(query, key, value, gate, mask, cp=None):
    if cp is not None:  # of this rank's tokens
        gate = cp.unshard(gate, 0, partial=True)

    def gated(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(gate[q_idx]) + gate[kv_idx]

    # As projections of [B, S, H, D] give it.
    query = (query.transpose(1, 2) * 2).transpose(1, 2)
    out, lse = flex_attention(query, key, value, gated, mask, enable_gqa=True, return_lse=True)
    return out.sin(), lse


def compiled(group, method, dynamic):
    torch._dynamo.reset()
    counters.clear()
    decisions(clear=True)
    cp = context_parallel(group, method, "head_tail")
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1, heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2)]
    gate = torch.randn(LENGTH, generator=generator)
    run = torch.compile(layer, backend="flex_inductor", fullgraph=True, dynamic=dynamic)
    for seed in range(3):
        mask = documents(seed)
        planned = cp.plan(mask)
        rows = [t.requires_grad_() for t in cp.shard(tensors, 2)]
        spread = method == "cast"
        own = (cp.shard(gate, 0) if spread else gate.clone()).requires_grad_()
        got = [*(run(*rows, own, planned, cp) if spread else run(*rows, own, planned))]
        loss = got[0].square().sum() + got[1].square().sum()

        def backward(got=got, loss=loss, wanted=(*rows, own)):
            got += torch.autograd.grad(loss, wanted)

        peak = backward() if seed < 2 else peak_allocated(backward)
        if not spread:
            torch.distributed.all_reduce(got[-1], group=group)
        wide = [t.double().requires_grad_() for t in (*tensors, gate)]
        want = layer(*wide, mask)
        gold = [*want, *torch.autograd.grad(want[0].square().sum() + want[1].square().sum(), wide)]
        wanted_gate = cp.shard(gold[5], 0) if spread else gold[5]
        for ours, whole in zip(got, [*cp.shard(gold[:5], 2), wanted_gate], strict=True):
            error = (ours - whole).abs().max() / whole.abs().max()
            assert error <= 2e-6, error
    found = [decision for decision in decisions() if not decision.call.startswith("plan")]
    return counters["stats"]["unique_graphs"], [decision.chosen for decision in found], peak


@pytest.mark.parametrize(
    "method, dynamic, routes",
    [
        ("cast", False, ["cpu", "cpu"]),
        ("ulysses", True, ["cpu", "cpu"]),
        ("ring", False, ["ring", "ring", "cpu", "cpu"]),
    ],
)
def test_new_documents_need_no_new_code(group, method, dynamic, routes):
    for graphs, served, peak in group.run(compiled, method, dynamic, ranks=2):
        assert graphs == 1
        assert served == routes
        if method == "ring":
            # 6.1 blocks, half of which are like the queries; 7.1 where gradients travel whole. With torch 2.11 any
            # compiled backward holds the gradient that it gets until it returns: one more.
            held = 0 if hasattr(torch.autograd.Function, "boxed_grads_call") else 1
            assert peak <= (6.25 + held) * (2 * 2 * LENGTH // 2 * 16 * 4)


def inspected(group):
    """What the first rank sees of masks that were planned for a ring, and for cast."""
    reports = []
    for method in ("ring", "cast"):
        cp = context_parallel(group, method, "contiguous")
        mask = cp.plan(documents(0))
        if not cp.rank:
            rows = [torch.randn(1, 4, mask.positions.numel(), 16) for _ in range(3)]
            reports.append(inspect(lambda q, k, v, m=mask: flex_attention(q, k, v, block_mask=m), *rows))
            assert reports[-1].plans == [Decision(*cp.choice)]
    return [(str(report), report.to_dict()["plans"]) for report in reports]


def test_the_inspector_shows_the_choice(group):
    ((ring, (plan,)), (cast, _)), _ = group.run(inspected, ranks=2)
    assert f"== {plan['call']}\n   chosen:   ring (asked for; by the model" in ring
    assert "rejected: cast: not asked for; by the model " in ring
    assert "schedule  in parts, one for each step of a ring of ranks" in ring
    assert "== plan of 1 mask, 256 tokens in 16 tiles of 16, 2 ranks\n   chosen:   cast" in cast
    assert "schedule  128 x 128 in tiles of 16 x 16: " in cast
