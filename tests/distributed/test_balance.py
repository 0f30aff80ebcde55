"""Balancers: as many tiles for each rank, even work, few bytes, quickly."""

import functools
import math
import re
import time

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import create_block_mask

from flex_inductor import FlexError, masks
from flex_inductor.distributed.balance import BALANCERS, components, owners, stretches
from flex_inductor.distributed.cost import estimate
from flex_inductor.distributed.work import Reads, TileWork

from . import dense

NAMED = [name for name in BALANCERS if name != "auto"]


def document_lengths(length, seed=0, mean=16384, sigma=1.0):
    """Log-normal, the last one cut."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(4 * length // mean + 64, generator=generator)
    found = (math.log(mean) - sigma**2 / 2 + sigma * draws).exp().long().clamp(min=1)
    ends = found.cumsum(0)
    found = found[: int((ends < length).sum()) + 1]
    found[-1] -= int(found.sum()) - length
    return found.tolist()


@pytest.fixture
def large():
    return million()


@functools.cache
def million():
    length = 1 << 20
    return {
        "documents": TileWork.of(masks.document(lengths=document_lengths(length)), length),
        "window": TileWork.of(masks.sliding_window(4096), length),
        "causal": TileWork.of(masks.causal(), length),
    }


def counts(owner, ranks):
    return torch.bincount(torch.tensor(owner), minlength=ranks)


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize("ranks", [1, 3, 16, 40])
@pytest.mark.parametrize(
    "mask_mod",
    [
        masks.causal(),
        masks.document(lengths=dense.RAGGED),
        masks.document(lengths=dense.RAGGED, causal=False),
        masks.sliding_window(200),
        masks.global_local(70, 40),
        lambda b, h, q_idx, kv_idx: (q_idx < 900) & (kv_idx < 64),
        lambda b, h, q_idx, kv_idx: q_idx < 0,
    ],
    ids=["causal", "documents", "whole", "window", "global", "dead rows", "nothing"],
)
def test_ranks_have_as_many_tiles_as_others_or_one_more(name, ranks, mask_mod):
    work = TileWork.of(mask_mod, dense.LENGTH, tile=64)
    owner = owners(name, work, ranks)
    assert len(owner) == work.tiles == 32
    held = counts(owner, ranks)
    assert held.numel() == ranks and set(held.tolist()) <= {32 // ranks, -(-32 // ranks)}


def test_contiguous_and_head_tail():
    work = TileWork.of(masks.causal(), 1280)
    assert owners("contiguous", work, 4) == (0, 0, 1, 1, 1, 2, 2, 3, 3, 3)
    assert owners("head_tail", work, 5) == (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)
    even = TileWork.of(masks.causal(), 128 * 24)
    assert even.loads(owners("head_tail", even, 3), 3).imbalance() == 1
    assert owners("head_tail", even, 3) == owners("documents", even, 3)


def test_documents_are_head_tail_each_by_itself():
    lengths = [512, 1536, 1024]
    work = TileWork.of(masks.document(lengths=lengths), sum(lengths))
    one, two, three = (0, 1, 1, 0), (0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0), (0, 0, 1, 1, 1, 1, 0, 0)
    assert owners("documents", work, 2) == one + two + three
    # Those that are too short for all ranks take turns.
    assert sorted(owners("documents", work, 24)) == list(range(24))


def test_stretches_and_components():
    """Tiles of 128: the documents end inside of the third and the sixth tile, and where the eighth ends."""
    lengths = [300, 400, 324, 128]
    for causal in (True, False):
        first, stop = TileWork.of(masks.document(lengths=lengths, causal=causal), sum(lengths)).hull
        assert components(first, stop).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    work = TileWork.of(masks.document(lengths=lengths), sum(lengths))
    assert stretches(work)[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    window = TileWork.of(masks.sliding_window(300), 1280).hull
    assert components(*window).tolist() == [0] * 10
    assert components(*TileWork.of(masks.sliding_window(1), 640).hull).tolist() == [0, 1, 2, 3, 4]


def test_work_is_even(large):
    for name in ("work", "work_and_bytes"):
        for mask, work in large.items():
            assert work.loads(owners(name, work, 512), 512).imbalance() <= 1.05, (name, mask)
    documents = large["documents"]
    assert documents.loads(owners("documents", documents, 512), 512).imbalance() < 1.5
    assert documents.loads(owners("contiguous", documents, 512), 512).imbalance() > 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [8, 100])
def test_work_and_bytes_on_any_documents(seed, ranks):
    length = ranks * 64 * 128
    work = TileWork.of(masks.document(lengths=document_lengths(length, seed, sigma=1.3)), length)
    found = work.loads(owners("work_and_bytes", work, ranks), ranks)
    other = work.loads(owners("work", work, ranks), ranks)
    assert found.imbalance() <= 1.05
    longest = int(stretches(work)[2].max())
    # A rank with the end of a document gets all of it, and not two of the longest ones.
    assert found.received.max() <= 1.05 * longest
    assert found.received.sum() < other.received.sum() * (0.9 if ranks == 8 else 0.5)
    assert found.sent.max() <= 1.2 * longest


@pytest.mark.parametrize("kind", ["any", "few dense", "heavy tail", "alternating", "ahead"])
@pytest.mark.parametrize("ranks", [7, 64, 600])
def test_work_and_bytes_on_any_rows(kind, ranks):
    """As even as the longest first, or within 5%, whatever rows read."""
    tiles = 1000
    generator = torch.Generator().manual_seed(ranks)
    row, draw = torch.arange(tiles), torch.rand(tiles, generator=generator)
    start, stop = {
        "any": (row * draw, row * draw + tiles * (1 - draw) ** 2),
        "few dense": (row * 0, torch.where(draw < 0.07, tiles, 1)),
        "heavy tail": (row * 0, draw**-1.2),
        "alternating": (row * 0, torch.where(row % 2 == 0, row + 1, 1)),
        "ahead": (row, row * 0 + tiles),
    }[kind]
    start, stop = start.long(), stop.long().clamp(max=tiles).maximum(start.long() + 1)
    work = TileWork(tiles * 128, 128, (Reads(1.0, (stop - start).double(), row, start, stop),))
    owner = owners("work_and_bytes", work, ranks)
    longest_first = work.loads(owners("work", work, ranks), ranks).imbalance()
    assert work.loads(owner, ranks).imbalance() <= 1.05 * longest_first
    assert set(counts(owner, ranks).tolist()) <= {tiles // ranks, tiles // ranks + 1}


def test_bytes_of_a_window_do_not_grow_with_the_ranks(large):
    for ranks in (8, 64, 256):
        found = large["window"].loads(owners("work_and_bytes", large["window"], ranks), ranks)
        assert found.received.max() == 32


def test_tiles_that_cannot_be_even():
    """One document on half of the tiles, and a rank for each tile: nothing can be changed for the better."""
    work = TileWork.of(masks.document(lengths=[1024, *[128] * 8]), 2048)
    found = work.loads(owners("work_and_bytes", work, 16), 16)
    assert found.work.max() == 8 and counts(owners("work_and_bytes", work, 16), 16).tolist() == [1] * 16
    two = work.loads(owners("work_and_bytes", work, 8), 8)
    assert two.work.max() == 9 and two.work.min() >= 2


def test_weights_decide_between_masks():
    """Where the window has nearly all the weight, one rank after the other has its own neighbouring tiles."""
    named = {"full": masks.causal(), "window": masks.sliding_window(512)}
    heavy = TileWork.of(named, 128 * 256, weights={"full": 1, "window": 1e6})
    assert owners("auto", heavy, 16) == owners("contiguous", heavy, 16)
    light = TileWork.of(named, 128 * 256, weights={"full": 1, "window": 1})
    assert owners("auto", light, 16) == owners("head_tail", light, 16)


def test_auto(large):
    assert owners("auto", large["window"], 64) == owners("contiguous", large["window"], 64)
    assert owners("auto", large["causal"], 64) == owners("head_tail", large["causal"], 64)
    assert owners("auto", large["documents"], 64) == owners("work_and_bytes", large["documents"], 64)


@pytest.mark.parametrize("name", BALANCERS)
def test_a_million_tokens_over_512_ranks_in_a_tenth_of_a_second(name, large):
    work = TileWork(large["documents"].length, 128, large["documents"].masks)
    taken = []
    for _ in range(3):
        begin = time.process_time()
        owners(name, work, 512)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.1


def owner_by_torch(balancer, length, tile, ranks):
    """As torch shards: its order, in as many equal pieces as there are ranks."""
    pieces = balancer._generate_indices()[0].view(ranks, -1).tolist()
    holder = {token: rank for rank, tokens in enumerate(pieces) for token in tokens}
    return tuple(holder[token] for token in range(0, length, tile))


def test_torchs_load_balancers():
    length, ranks = 4096, 4
    causal = create_block_mask(masks.causal(), None, None, length, length, "cpu")
    work = TileWork.of(causal)
    head_tail = _HeadTailLoadBalancer(length, ranks, "cpu")
    assert owners(head_tail, work, ranks) == owners("head_tail", work, ranks)
    for balancer in (
        head_tail,
        _PerDocumentHeadTailLoadBalancer([[1024, 3072]], ranks, "cpu"),
        _PTRRLoadBalancer(causal, ranks),
    ):
        found = owners(balancer, work, ranks)
        assert found == owner_by_torch(balancer, length, 128, ranks)
        assert counts(found, ranks).tolist() == [8] * 4


def test_torchs_orders_that_no_layout_has():
    work = TileWork.of(masks.causal(), 1024)
    with pytest.raises(FlexError, match=r"_HeadTailLoadBalancer: its order .* tokens of one tile of 128"):
        owners(_HeadTailLoadBalancer(1024, 8, "cpu"), work, 8)
    by_head = create_block_mask(lambda b, h, q, kv: q * h >= kv, 1, 2, 1024, 1024, "cpu")
    with pytest.raises(FlexError, match="expected one order of 1024 tokens, the same for all batches, got"):
        owners(_PTRRLoadBalancer(by_head, 2), work, 2)
    differ = _PerDocumentHeadTailLoadBalancer([[512, 512], [1024]], 2, "cpu")
    with pytest.raises(FlexError, match=re.escape("got [2, 1024]")):
        owners(differ, work, 2)


def test_functions():
    work = TileWork.of(masks.causal(), 1024)
    assert owners(lambda work, ranks: [1] * work.tiles, work, 2) == (1,) * 8
    assert owners(lambda work, ranks: torch.arange(work.tiles) % ranks, work, 4) == (0, 1, 2, 3) * 2


@pytest.mark.parametrize(
    "balance, ranks, message",
    [
        (
            "fair",
            2,
            "balance: expected one of auto, contiguous, head_tail, documents, work, work_and_bytes, a",
        ),
        (3, 2, "one of torch's load balancers, got 3"),
        ("work", 0, "ranks: expected an integer of at least 1, got 0"),
        ("work", 2.0, "ranks: expected an integer of at least 1, got 2.0"),
        (
            lambda work, ranks: [0, 1],
            2,
            "a rank from 0 to 1 for each of 8 tiles, got 2 entries, least and most [0, 1]",
        ),
        (lambda work, ranks: [2] * 8, 2, "got 8 entries, least and most [2, 2]"),
        (lambda work, ranks: [], 2, "got 0 entries"),
        (lambda work, ranks: [0.5] * 8, 2, "got torch.float32 of shape [8]"),
        (lambda work, ranks: None, 2, "got None"),
        (lambda work, ranks: "head_tail", 2, "got 'head_tail'"),
    ],
)
def test_refused(balance, ranks, message):
    with pytest.raises(FlexError, match=re.escape(message)):
        owners(balance, TileWork.of(masks.causal(), 1024), ranks)


def test_auto_for_other_methods(large):
    """A ring waits for its slowest rank at every step: even work over all steps is not enough."""
    documents = large["documents"]
    for_ring = owners("auto", documents, 16, method="ring")
    assert for_ring != owners("auto", documents, 16)
    taken = [
        estimate(documents, owner, 16, "ring").seconds for owner in (for_ring, owners("auto", documents, 16))
    ]
    assert taken[0] < 0.9 * taken[1]
    assert owners("auto", documents, 16, method="ring_ulysses") == for_ring
