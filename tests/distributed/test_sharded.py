"""DTensors outside of a plan: batches and heads that are spread over ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flex_inductor import (
    AuxRequest,
    FlexError,
    Sequences,
    create_block_mask,
    flex_attention,
    varlen_attention,
)
from flex_inductor.distributed.context import context_parallel
from flex_inductor.masks import causal
from tests.distributed.cases import Case, attend, compiled, mesh_of, whole

LENGTH = 130
BATCHES, HEADS, ALL = Shard(0), Shard(1), Replicate()
CASES = {
    "heads of each window": (Case("heads", LENGTH, 2, 8, 4, entropy=True), (HEADS, HEADS)),
    "heads and batches": (Case("batches", LENGTH, 3, 4, 2, sinks=True), (BATCHES, HEADS)),
    "replicas": (Case("heads", LENGTH, 2, 8, 2, sinks=True), (ALL, HEADS)),
    "batches in parts of parts": (Case("batches", LENGTH, 3, 2, 1), (BATCHES, BATCHES)),
    "more ranks than heads": (Case("heads", LENGTH, 1, 3, 3), (HEADS, HEADS)),
    "all everywhere": (Case("window", LENGTH, 1, 2, 2), (ALL, ALL)),
    "dropout": (Case("none", LENGTH, 1, 8, 4, dropout=0.25), (ALL, HEADS)),
}


def sharded(group, case, placements, form, is_compiled):
    """The results of one rank, whole again."""
    mesh = mesh_of(group)
    *rows, table, gate = case.tensors()
    rows = [distribute_tensor(tensor, mesh, placements) for tensor in rows]
    captures = [table, gate]
    if not is_compiled:  # which takes no DTensors as captures
        captures = [distribute_tensor(tensor, mesh, [ALL, ALL]) for tensor in captures]
    mask = case.block_mask()
    if mask is not None and form == "lists":
        mask = mask.to_block_mask()
    found = attend(case, [*rows, *captures], mask, compiled() if is_compiled else flex_attention)
    alike = 1
    for dim, placement in enumerate(placements):
        alike *= mesh.size(dim) if placement == ALL else 1
    for name, tensor in found.items():
        if isinstance(tensor, DTensor):
            if name not in ("d_table", "d_gate"):
                assert tensor.placements == placements, (name, tensor.placements)
            found[name] = tensor.full_tensor()
        elif is_compiled:
            torch.distributed.all_reduce(tensor, group=group)
            found[name] = tensor / alike
    return found


@pytest.mark.parametrize("form", ["lists", "runs"])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_call(group, name, form):
    case, placements = CASES[name]
    if case.mask == "none" and form == "lists":
        form = "runs"
    want = whole(case)
    for found in group.run(sharded, case, placements, form, False):
        assert found.keys() == want.keys()
        for result, tensor in found.items():
            torch.testing.assert_close(tensor, want[result], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "form, name", [("lists", "heads of each window"), ("runs", "batches in parts of parts")]
)
def test_compiled(group, name, form):
    case, placements = CASES[name]
    case = case._replace(dtype=torch.float32)
    want = whole(case)
    for found in group.run(sharded, case, placements, form, True, ranks=2):
        for result, tensor in found.items():
            torch.testing.assert_close(tensor.to(want[result].dtype), want[result], rtol=1e-5, atol=2e-5)


def snippet(group, code):
    q, k, v = torch.randn(3, 1, 4, LENGTH, 16, generator=torch.Generator().manual_seed(0))
    mask = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu")
    names = {"distribute_tensor": distribute_tensor, "Shard": Shard, "flex_attention": flex_attention}
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    names |= {"mesh": {"tp": mesh_of(group)["heads"]}, "slopes": slopes, "mask": mask, "q": q, "k": k, "v": v}
    exec(compile(code, "docs/context_parallel.md", "exec"), names)
    want = flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), mask)
    torch.testing.assert_close(names["out"].full_tensor(), want)


def test_the_page(group):
    page = (Path(__file__).parents[2] / "docs/context_parallel.md").read_text()
    _, code, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    group.run(snippet, code, ranks=2)


def refused(group, what):
    mesh = mesh_of(group)["heads"]
    query, key, value = torch.randn(3, 2, 4, LENGTH, 16)

    def spread(tensor, *placements):
        return distribute_tensor(tensor, mesh, placements)

    named = {"enable_gqa": True}
    if what == "sequence":
        rows = [spread(t, Shard(2)) for t in (query, key, value)]
    elif what == "sum":
        rows = [DTensor.from_local(t, mesh, [Partial()], run_check=False) for t in (query, key, value)]
    elif what == "plain":
        rows = [spread(query, HEADS), key, value]
    elif what == "unlike":
        rows = [spread(query, HEADS), spread(key, ALL), spread(value, ALL)]
    elif what == "kv heads":
        rows = [spread(query, HEADS), spread(key[:, :1], HEADS), spread(value[:, :1], HEADS)]
    elif what == "batch of keys":
        rows = [spread(query, BATCHES), spread(key[:1], BATCHES), spread(value[:1], BATCHES)]
    else:
        rows = [spread(t, BATCHES if what == "dropout of batches" else HEADS) for t in (query, key, value)]
    if what in ("dropout", "dropout of batches"):
        named["dropout_p"] = 0.5
    if what == "dropout of batches":
        named["rng_state"] = torch.tensor(1), torch.tensor(2)
    if what == "request":
        named["return_aux"] = AuxRequest(column_sums=True)
    if what == "mask":
        named["block_mask"] = create_block_mask(causal(), 3, None, LENGTH, LENGTH, "cpu")
    try:
        if what == "plan":
            cp = context_parallel(mesh)
            cp.plan(causal(), LENGTH)
            with cp:
                flex_attention(*rows, **named)
        if what == "packed":
            packed = [tensor[0].transpose(0, 1) for tensor in rows]
            varlen_attention(*packed, Sequences.from_lengths([LENGTH]))
        flex_attention(*rows, **named)
    except FlexError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "what, text",
    [
        (
            "sequence",
            r"query: a DTensor with placements \(Shard\(dim=2\),\); expected .* use flex_inductor.context",
        ),
        (
            "sum",
            r"query: a DTensor with placements \(Partial\(sum\),\); expected Shard\(0\), batches, Shard\(1\)",
        ),
        ("plain", "key: expected a DTensor like the others"),
        (
            "unlike",
            r"key: a DTensor with placements \(Replicate\(\),\), or on .* query's, \(Shard\(dim=1\),\)",
        ),
        ("kv heads", "key: 1 heads in 2 parts, beside query's 4; expected a number that 2 divides"),
        ("batch of keys", "key: 1 batches in 2 parts, beside query's 2"),
        ("dropout", "dropout_p: queries are DTensors .* Pass rng_state"),
        ("dropout of batches", r"dropout_p: .* placements \(Shard\(dim=0\),\); expected"),
        ("request", "return_aux: column_sums is not there"),
        ("mask", "block_mask has B=3, but query has B=2"),
        ("packed", "query: expected a tensor of this rank, got a DTensor. Pass its .to_local()"),
        ("plan", "called inside of `with context_parallel"),
    ],
)
def test_refused(group, what, text):
    (first, _) = group.run(refused, what, ranks=2)
    assert re.search(text, first), first
