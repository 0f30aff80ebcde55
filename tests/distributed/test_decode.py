"""Decoding over a cache of which each rank has a part."""

import math
import re
from pathlib import Path

import pytest
import torch

from flex_inductor import FlexError, Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.distributed.context import context_parallel
from flex_inductor.masks import causal, sliding_window
from tests.support import served_by

LENGTH = 37
MASKS = {"none": None, "causal": causal(), "window": sliding_window(6)}


def whole(dtype=torch.float64, queries=3):
    """A query at the end of the sequence, keys, values, and a table of biases."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, 4, queries, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 8), (4, 2 * LENGTH)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def biased(table):
    return lambda s, b, h, q_idx, kv_idx: s + table[h, q_idx - kv_idx + LENGTH] - (q_idx + b) * kv_idx / 200


def shares(rank, ranks, batches):
    """The positions of this rank's keys, in no order, with room between; the last rank has none, another few."""
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
    ends = [0, *(LENGTH * (r + 1) ** 2 // max(1, ranks - 1) ** 2 for r in range(ranks - 1)), LENGTH]
    mine = order[ends[rank] : ends[rank + 1]]
    spread = torch.full((2 * len(mine),), -1)
    spread[::2] = mine
    return spread.expand(2, -1) if batches else spread


def decoded(group, mask, dtype, batches):
    cp = context_parallel(group)
    query, key, value, table = whole(dtype)
    positions = shares(cp.rank, cp.ranks, batches)
    place = positions[0] if batches else positions
    # What no key is at may hold anything.
    here = [torch.where((place >= 0)[:, None], t[:, :, place], math.nan) for t in (key, value)]
    at = torch.arange(LENGTH - 3, LENGTH)
    at = at.expand(2, -1) if batches else at
    out, lse = cp.decode(
        query, *here, biased(table), MASKS[mask], positions=positions, at=at, enable_gqa=True, return_lse=True,
        sinks=sinks_of(mask, table),
    )  # fmt: skip
    return out, lse, len(place)


def sinks_of(mask, table):
    return None if mask == "none" else table[:, 3]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "mask, dtype, batches",
    [("none", torch.float64, False), ("causal", torch.float64, True), ("window", torch.bfloat16, False)],
)
def test_as_one_process(group, mask, dtype, batches, ranks):
    query, key, value, table = (t.to(dtype).double() for t in whole())
    first = torch.cat([torch.zeros_like(query[:, :, :1]).expand(-1, -1, LENGTH - 3, -1), query], 2)
    mod = MASKS[mask]
    plain = mod and create_block_mask(mod, None, None, LENGTH, LENGTH, "cpu", 16)
    want, want_lse = (
        t[:, :, -3:]
        for t in flex_attention(
            first,
            key,
            value,
            biased(table),
            plain,
            enable_gqa=True,
            return_lse=True,
            sinks=sinks_of(mask, table),
        )
    )
    found = group.run(decoded, mask, dtype, batches, ranks=ranks)
    assert ranks == 1 or (found[-1][2] == 0 and len({size for *_, size in found}) == ranks)
    limit = 1e-14 if dtype == torch.float64 else 4e-3
    for out, lse, _ in found:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
        assert out.dtype == dtype
        assert (out.double() - want).abs().max() <= limit * want.abs().max()
        assert (lse.double() - want_lse).abs().max() <= max(limit / 4, 1e-13) * want_lse.abs().max()


def nothing_seen(group):
    cp = context_parallel(group)
    query, key, value, _ = whole()
    none = torch.full((LENGTH,), -1)
    out, lse = cp.decode(
        query, key, value, positions=none, at=torch.arange(3), enable_gqa=True, return_lse=True
    )
    assert not out.any() and (lse == -math.inf).all()


def test_nobody_has_a_key(group):
    group.run(nothing_seen, ranks=2)


def paged(group):
    """Each rank has pages of its own for the same two sequences."""
    cp = context_parallel(group)
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 4, 16, dtype=torch.float64, generator=generator)
    # Keys and values, 4 pages of 8.
    pools = torch.randn(2, 4, 8, 2, 16, dtype=torch.float64, generator=generator)
    pages = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    used = torch.tensor([13, 9], dtype=torch.int32)

    def of(table, used):
        each = torch.arange(3, dtype=torch.int32)
        sequences = Sequences(each, used_k=used, pages=table, page_size=8, max_q=1)
        return varlen_attention(query, *pools, sequences=sequences, enable_gqa=True, return_lse=True)

    want, want_lse = of(pages, used)
    mine = of(pages[:, cp.rank :][:, :1], (used - 8 * cp.rank).clamp(max=8))
    out, lse = mine[0], mine[1]
    turned = lse if lse.shape == out.shape[:-1] else lse.mT
    out, lse = cp.merge(out, turned)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse if want_lse.shape == lse.shape else lse.mT, want_lse, rtol=0, atol=1e-14)


def test_pages(group):
    group.run(paged, ranks=2)


def compiled(group):
    torch._dynamo.reset()
    cp = context_parallel(group)
    query, key, value, table = whole(torch.float32)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.arange(LENGTH) * 2 % LENGTH  # all of them, on each rank

    def step(query, key, value, table, positions, at):
        mods = biased(table), causal()
        return cp.decode(query * 2, key, value, *mods, positions=positions, at=at, enable_gqa=True).sin()

    given = (query, key, value, table, positions, torch.arange(3) + 20)
    run = torch.compile(step, backend="flex_inductor", fullgraph=True)
    with served_by("cpu"):
        torch.testing.assert_close(run(*given), step(*given), rtol=0, atol=2e-6)


def test_compiled(group):
    group.run(compiled, ranks=2)


def far_from_filled(group):
    """A mask_mod that looks positions up sees none below 0."""
    query, key, value, _ = whole()
    ids = torch.arange(LENGTH) // 5
    positions = torch.where(torch.arange(LENGTH) % 2 == 0, torch.arange(LENGTH), -1_000_000)
    found, want = (
        context_parallel(group).decode(
            query, key[:, :, rows], value[:, :, rows], None, lambda b, h, q, kv: ids[kv] <= ids[q] - 1,
            positions=positions[rows], at=torch.arange(LENGTH - 3, LENGTH), enable_gqa=True,
        )
        for rows in (slice(None), slice(None, None, 2))
    )  # fmt: skip
    torch.testing.assert_close(found, want)


def test_room_is_no_position(group):
    group.run(far_from_filled, ranks=1)


def refused(group, what):
    cp = context_parallel(group)
    query, key, value, _ = whole()
    positions, at = torch.arange(LENGTH), torch.arange(3)
    try:
        if what == "positions":
            positions = positions[1:]
        elif what == "at":
            at = at.float()
        elif what == "gradient":
            key.requires_grad_()
        elif what == "capture":
            slope = torch.ones((), dtype=query.dtype, requires_grad=True)
            cp.decode(
                query,
                key,
                value,
                lambda s, b, h, q, kv: s * slope,
                positions=positions,
                at=at,
                enable_gqa=True,
            )
        elif what == "merge gradient":
            cp.merge(query.requires_grad_(), query[..., 0])
        elif what == "merge":
            cp.merge(query, query[..., 0].mT)
        cp.decode(query, key, value, positions=positions, at=at, enable_gqa=True)
    except FlexError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "what, text",
    [
        (
            "positions",
            r"decode: positions: expected whole numbers of shape \[37\] or \[2, 37\], got a tensor of",
        ),
        ("at", r"decode: at: expected whole numbers of shape \[3\] or .* of shape \[3\] of torch.float32"),
        ("gradient", r"decode: has no gradient, .* Call it under torch.no_grad\(\)"),
        ("capture", "decode: has no gradient, but a tensor that score_mod looks up requires one"),
        ("merge gradient", "merge: has no gradient, but out or lse requires one"),
        ("merge", r"merge: lse: expected shape \[2, 4, 3\], .* got \[2, 3, 4\]. Transpose it"),
    ],
)
def test_refused(group, what, text):
    (first,) = group.run(refused, what, ranks=1)
    assert re.search(text, first), first


def snippet(group, code):
    cp = context_parallel(group, "cast", "head_tail")
    cp.plan(causal(), 300, block=16)
    k, v = cp.shard(list(torch.randn(2, 1, 2, 300, 16)), 2)
    names = {
        **{"torch": torch, "cp": cp, "k": k, "v": v, "q_new": torch.randn(1, 2, 1, 16)},
        **{"room": 200, "length": 300, "score_mod": lambda s, b, h, q_idx, kv_idx: s - (q_idx - kv_idx)},
    }
    exec(compile(code, "docs/context_parallel.md", "exec"), names)
    return names["out"], names["positions"]


def test_the_page(group):
    page = (Path(__file__).parents[2] / "docs/context_parallel.md").read_text()
    _, _, code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (one, places), (other, more) = group.run(snippet, code, ranks=2)
    assert torch.equal(one, other) and one.shape == (1, 2, 1, 16)
    assert sorted([p for p in (*places.tolist(), *more.tolist()) if p >= 0]) == list(range(300))
