"""What is sent: counted at the process group, as planned; and the same bits each time."""

import pytest
import torch
import torch.distributed as dist

from flex_inductor import AuxRequest, flex_attention
from flex_inductor.distributed.context import context_parallel
from tests.distributed.cases import Case, attend, mesh_of
from tests.memory import peak_allocated

METHODS = ["cast", "all_gather", "ulysses", "ring", "ring_ulysses"]


class Counted:
    """Bytes that this process gives process groups for others, and the ranks that it gives them to."""

    def __init__(self):
        self.bytes, self.to = 0, set()

    def __enter__(self):
        kind = dist.ProcessGroup
        self.exchange = "all_to_all_single" if hasattr(kind, "all_to_all_single") else "alltoall_base"
        self.kept = {name: vars(kind)[name] for name in (self.exchange, "send")}

        def exchange(group, out, given, out_sizes, sizes, *rest):
            row = given[0].nbytes if len(given) else 0
            for rank, rows in enumerate(sizes):
                self.add(group, rank, rows * row)
            return self.kept[self.exchange].__get__(group)(out, given, out_sizes, sizes, *rest)

        def send(group, tensors, to, *rest):
            self.add(group, to, sum(t.nbytes for t in tensors))
            return self.kept["send"].__get__(group)(tensors, to, *rest)

        setattr(kind, self.exchange, exchange)
        kind.send = send
        return self

    def add(self, group, rank, size):
        if rank != group.rank() and size:
            self.bytes += size
            self.to.add(rank)

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist.ProcessGroup, name, function)


def counted(group, case, method, balance):
    cp = context_parallel(mesh_of(group) if method == "ring_ulysses" else group, method, balance)
    mask = cp.plan(case.block_mask(), case.length, block=case.block[0])
    query, key, value, grad, grad_lse, *_ = cp.shard(case.tensors()[:5], 2)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    with Counted() as forward:
        out, lse = flex_attention(*leaves, block_mask=mask, enable_gqa=True, return_lse=True)
    with Counted() as backward:
        torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    sent = mask.bytes_sent(query, key, value, AuxRequest(lse=True))
    return (
        (forward.bytes, backward.bytes),
        sent,
        sorted(forward.to),
        key[:, :, 0].nbytes + value[:, :, 0].nbytes,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask, balance", [("documents", "head_tail"), ("dead", "contiguous")])
def test_bytes_are_those_of_the_plan(group, method, mask, balance):
    case = Case(mask, score=False)
    for got, planned, _, _ in group.run(counted, case, method, balance):
        assert got == tuple(planned)
        assert mask == "dead" or min(got) > 0


@pytest.mark.parametrize("method", ["cast", "ring"])
def test_a_window_sends_to_neighbours_alone(group, method):
    """However many ranks there are."""
    case = Case("window", length=512, score=False)
    sent = {}
    for ranks in (2, 4):
        found = group.run(counted, case, method, "contiguous", ranks=ranks)
        sent[ranks] = [got[0] for got, *_ in found]
        assert [to for _, _, to, _ in found] == [[rank + 1] for rank in range(ranks - 1)] + [[]]
        row = found[0][3]
    if method == "cast":  # a window of 40 reaches into two tiles of 32
        assert sent == {2: [64 * row, 0], 4: [64 * row] * 3 + [0]}
    else:
        assert sent == {2: [256 * row, 0], 4: [128 * row] * 3 + [0]}


def peaks(group, method, mask_mod):
    """The most bytes that a forward and a backward hold, with as many tokens on each rank."""
    local = 1024
    cp = context_parallel(group, method, "contiguous")
    mask = cp.plan(mask_mod, local * group.size(), block=128)
    rows = [torch.randn(1, heads, local, 128, requires_grad=True) for heads in (1, 1, 1)]
    found = []
    out = None

    def forward():
        nonlocal out
        out = flex_attention(*rows, block_mask=mask)

    for run in (forward, lambda: out.sum().backward()):
        dist.barrier(group)
        found.append(peak_allocated(run))
    return found


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 128)


def test_memory_of_a_window_does_not_grow_with_ranks(group):
    two, four = (group.run(peaks, "cast", window, ranks=ranks) for ranks in (2, 4))
    for got, before in zip(four[3], two[1], strict=True):  # of the last rank, which reads most
        assert got <= 1.05 * before


def test_a_ring_holds_two_blocks_and_their_gradients(group):
    """Beside this rank's own results, and what one step gives that is like the queries."""
    forward, backward = group.run(peaks, "ring", causal)[3]
    block, rows = 2 * 1024 * 128 * 4, 1024 * 128 * 4  # keys and values of one rank; queries
    tiles = 2**19
    assert forward <= 2 * block + 2 * rows + tiles
    assert backward <= 2 * block + 2 * block + (rows + block) + rows + tiles


def twice(group, method):
    case = Case(batch=2, dtype=torch.float32)
    cp = context_parallel(mesh_of(group) if method == "ring_ulysses" else group, method, "work")
    mask = cp.plan(case.block_mask())
    *rows, table, gate = case.tensors()
    found = [attend(case, [*cp.shard(rows, 2), table, gate], mask) for _ in range(2)]
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bits_each_time(group, method):
    group.run(twice, method)
