"""DTensors as queries, keys and values, and as what mods look up."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flex_inductor import AuxRequest, FlexError, create_block_mask, flex_attention
from flex_inductor.distributed.context import context_parallel
from flex_inductor.masks import causal
from tests.distributed.cases import Case, mesh_of

LENGTH = 300


def dtensors(group, method):
    """Heads over one dimension of a mesh, the sequence over the other; mods see global heads."""
    mesh = mesh_of(group)
    case = Case(heads=8, kv_heads=4, length=LENGTH)
    cp = context_parallel(mesh["ring"], method, "contiguous")
    mask = cp.plan(create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu", 32))
    *rows, table, gate = case.tensors()
    local = [t.chunk(2, 1)[mesh.get_local_rank("heads")] for t in cp.shard(rows[:3], 2)]
    query, key, value = (
        DTensor.from_local(t.contiguous(), mesh, [Shard(2), Shard(1)], run_check=False).requires_grad_()
        for t in local
    )
    table.requires_grad_()
    given = {"enable_gqa": True, "return_aux": AuxRequest(lse=True, entropy=True), "sinks": gate[:8]}
    out, aux = flex_attention(query, key, value, case.score_mod(table, gate), mask, **given)
    lse, entropy = aux.lse, aux.entropy
    assert out.placements == query.placements and out.shape == (1, 8, LENGTH, 8)
    total = out.to_local().sum() + lse.to_local().sum() + entropy.to_local().square().sum()
    grads = torch.autograd.grad(total, (query, key, table))
    whole = [t.detach().requires_grad_() for t in (*rows[:3], table)]
    plain = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu", 32)
    want, found = flex_attention(*whole[:3], case.score_mod(whole[3], gate), plain, **given)
    total = want.sum() + found.lse.sum() + found.entropy.square().sum()
    wanted = torch.autograd.grad(total, (whole[0], whole[1], whole[3]))

    def mine(tensor):
        return cp.shard(tensor, 2).chunk(2, 1)[mesh.get_local_rank("heads")]

    got = [t.to_local() for t in (out, lse, entropy, *grads[:2])]
    for ours, gold in zip(got, (want, found.lse, found.entropy, *wanted[:2]), strict=True):
        torch.testing.assert_close(ours, mine(gold), rtol=0, atol=1e-12)
    torch.distributed.all_reduce(grads[2], group=group)
    torch.testing.assert_close(grads[2], wanted[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["cast", "ulysses", "ring"])
def test_dtensors(group, method):
    group.run(dtensors, method)


def captured(group, method, balance):
    """A table whose heads another dimension of the mesh has, and a gate of this rank's tokens."""
    mesh = mesh_of(group)
    case = Case(heads=4, kv_heads=4, length=LENGTH)
    cp = context_parallel(mesh["ring"], method, balance)
    mask = cp.plan(causal(), LENGTH, block=32)
    *rows, table, gate = case.tensors()
    heads = mesh.get_local_rank("heads")

    def mine(tensor):
        return cp.shard(tensor, 2).chunk(2, 1)[heads].contiguous()

    query, key, value = (
        DTensor.from_local(mine(t), mesh, [Shard(2), Shard(1)], run_check=False).requires_grad_()
        for t in rows[:3]
    )
    tables = distribute_tensor(table, mesh, [Replicate(), Shard(0)]).requires_grad_()
    tokens = cp.shard(gate, 0).requires_grad_()
    gates = DTensor.from_local(tokens, mesh, [Shard(0), Replicate()], run_check=False)
    out, lse = flex_attention(query, key, value, case.score_mod(tables, gates), mask, return_lse=True)
    whole = [t.detach().requires_grad_() for t in (*rows[:3], table, gate)]
    plain = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu", 32)
    want, want_lse = flex_attention(*whole[:3], case.score_mod(*whole[3:]), plain, return_lse=True)
    torch.testing.assert_close(out.to_local(), mine(want), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse.to_local(), mine(want_lse), rtol=0, atol=1e-12)
    (out.to_local().square().sum() + lse.to_local().sum()).backward()
    d_query, _, _, d_table, d_gate = torch.autograd.grad(want.square().sum() + want_lse.sum(), whole)
    torch.testing.assert_close(query.grad.to_local(), mine(d_query), rtol=0, atol=1e-12)
    assert tables.grad.placements[1] == Shard(0)
    torch.testing.assert_close(tables.grad.full_tensor(), d_table, rtol=0, atol=1e-12)
    # The heads of the other ranks gave their parts too.
    torch.testing.assert_close(tokens.grad, cp.shard(d_gate, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method, balance", [("cast", "head_tail"), ("ulysses", "contiguous"), ("ring", "head_tail")]
)
def test_captures(group, method, balance):
    group.run(captured, method, balance)


def alone(group):
    """Plain queries, and captures that are spread over the plan's ranks."""
    mesh = mesh_of(group)["heads"]
    case = Case(length=LENGTH)
    cp = context_parallel(mesh, "cast", "head_tail")
    mask = cp.plan(causal(), LENGTH, block=32)
    *rows, table, gate = case.tensors()
    leaves = [t.requires_grad_() for t in cp.shard(rows[:3], 2)]
    tables = distribute_tensor(table, mesh, [Replicate()]).requires_grad_()
    tokens = cp.shard(gate, 0).requires_grad_()
    gates = DTensor.from_local(tokens, mesh, [Shard(0)], run_check=False)
    out = flex_attention(*leaves, case.score_mod(tables, gates), mask, enable_gqa=True)
    out.sum().backward()
    whole = [t.detach().requires_grad_() for t in (*rows[:3], table, gate)]
    plain = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu", 32)
    want = flex_attention(*whole[:3], case.score_mod(*whole[3:]), plain, enable_gqa=True)
    want.sum().backward()
    torch.testing.assert_close(out, cp.shard(want, 2), rtol=0, atol=1e-12)
    assert tables.grad.placements == (Partial(),)
    torch.testing.assert_close(tables.grad.full_tensor(), whole[3].grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(tokens.grad, cp.shard(whole[4].grad, 0), rtol=0, atol=1e-12)


def test_captures_beside_plain_queries(group):
    group.run(alone, ranks=2)


def refused(group, what):
    mesh = mesh_of(group)["heads"]
    cp = context_parallel(mesh, "cast", "head_tail")
    mask = cp.plan(causal(), LENGTH, block=32)
    rows = cp.shard(list(torch.randn(3, 1, 2, LENGTH, 16)), 2)
    gate = torch.randn(LENGTH)
    compiled = what == "compiled"
    if what == "parameter":
        gate = torch.nn.Parameter(DTensor.from_local(cp.shard(gate, 0), mesh, [Shard(0)], run_check=False))
    elif what == "chunk":
        gate = distribute_tensor(gate, mesh, [Shard(0)])
    elif what == "partial":
        gate = DTensor.from_local(gate, mesh, [Partial()], run_check=False)
    elif compiled:
        gate = distribute_tensor(gate, mesh, [Replicate()])

    def call():
        return flex_attention(*rows, lambda s, b, h, q, kv: s + gate[kv], mask)

    try:
        (torch.compile(call, backend="flex_inductor", fullgraph=True) if compiled else call)()
    except FlexError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "what, text",
    [
        ("parameter", r"a parameter with placements \(Shard\(dim=0\),\), which torch cuts into consecutive"),
        ("chunk", "along the plan's mesh dimension, with 150 entries on rank 0; expected 1.., those of its"),
        ("partial", r"a DTensor with placements \(Partial\(sum\),\); expected Replicate\(\) or Shard on"),
        (
            "compiled",
            r"score_mod: looks up a DTensor, which compiled code does not trace. Look up x.to_local",
        ),
    ],
)
def test_refused(group, what, text):
    (first, _) = group.run(refused, what, ranks=2)
    assert re.search(text, first), first
