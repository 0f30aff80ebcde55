"""Masks on their way: out of a loader's worker, to other devices, in pipeline microbatches, a new one in each step."""

import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from flex_inductor import Sequences, create_block_mask, decisions, flex_attention, masks
from flex_inductor.masks import RunSchedule
from flex_inductor.masks.window_schedule import WindowSchedule
from flex_inductor.sequences import varlen_attention
from tests.support import served_by

LENGTH, BATCH = 200, 4


def inputs(batch=BATCH, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, 2, length, 16, generator=generator).unbind()


def documents(seed):
    """Of each batch its own, [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(BATCH, LENGTH, generator=generator) < 0.03).cumsum(1)


def dense(ids):
    """Attention within documents, causal, in torch's own words."""
    length = ids.size(1)
    seen = (ids[:, None, :, None] == ids[:, None, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, seen[: len(q)])


class Batches(Dataset):
    """Item n: a mask as `made` makes it, in whichever process reads it."""

    def __init__(self, made, count):
        self.made, self.count = made, count

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        return documents(n), self.made(documents(n))


def of_library(ids, compact):
    return create_block_mask(masks.document(ids), BATCH, None, LENGTH, LENGTH, "cpu", 64, compact=compact)


def of_closure(ids, compact):
    def own(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] - ids[b, kv_idx] == 0) & (kv_idx <= q_idx)

    return create_block_mask(own, BATCH, None, LENGTH, LENGTH, "cpu", 64, compact=compact)


KINDS = {
    (of_library, False): BlockMask,
    (of_closure, False): BlockMask,
    (of_library, True): WindowSchedule,
    (of_closure, True): RunSchedule,
}


def from_worker(made, count, start="fork"):
    return DataLoader(Batches(made, count), batch_size=None, num_workers=1, multiprocessing_context=start)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("made", [of_library, of_closure])
def test_from_a_loader_worker(made, compact, start):
    for n, (_, mask) in enumerate(from_worker(partial(made, compact=compact), 2, start)):
        assert type(mask) is KINDS[made, compact]
        torch.testing.assert_close(flex_attention(*inputs(), block_mask=mask), dense(documents(n))(*inputs()))


def sequences(ids):
    packed = Sequences.from_lengths(ids[0].bincount())
    return packed, packed.mask(masks.causal()), packed.mask(masks.global_local(9, 2))


def test_masks_of_sequences_from_a_loader_worker():
    q, k, v = (tensor[0].transpose(0, 1) for tensor in inputs())
    for n, (_, (packed, causal, other)) in enumerate(from_worker(sequences, 2)):
        here, own_causal, own_other = sequences(documents(n))
        for mask, own in ((causal, own_causal), (other, own_other)):
            expected = varlen_attention(q, k, v, here, block_mask=own)
            torch.testing.assert_close(
                varlen_attention(q, k, v, packed, block_mask=mask), expected, rtol=0, atol=0
            )
        one = dense(documents(n)[:1])(*(tensor[:1] for tensor in inputs()))
        torch.testing.assert_close(
            varlen_attention(q, k, v, packed, block_mask=causal), one[0].transpose(0, 1)
        )


@pytest.mark.parametrize("compact", [False, True])
def test_fifty_masks_without_recompiling(compact):
    """Another mask and another length in each step, dynamic shapes, forward and backward."""

    def made(ids):
        length = LENGTH - 3 * int(ids.sum() % 20)
        return create_block_mask(
            masks.document(ids[:, :length].contiguous()),
            BATCH,
            None,
            length,
            length,
            "cpu",
            64,
            compact=compact,
        )

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="flex_inductor", fullgraph=True, dynamic=True)
    lengths = set()
    with served_by("cpu"):
        for n, (ids, mask) in enumerate(from_worker(made, 50)):
            length = mask.seq_lengths[0]
            lengths.add(length)
            given = [tensor.requires_grad_() for tensor in inputs(length=length, seed=n)]
            with torch.compiler.set_stance("default" if n < 3 else "fail_on_recompile"):
                out = compiled(*given, block_mask=mask)
                found = torch.autograd.grad(out.square().sum(), given)
            expected = dense(ids[:, :length])(*given)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given))
        assert decisions()
    assert len(lengths) > 10


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("made", [of_library, of_closure])
def test_moved_to_another_device(made, compact):
    mask = made(documents(0), compact)
    there = mask.to("meta")
    leaves = pytree.tree_leaves(there if compact else there.as_tuple())
    assert {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} == {"meta"}
    back = mask.to("cpu")
    torch.testing.assert_close(flex_attention(*inputs(), block_mask=back), dense(documents(0))(*inputs()))


@pytest.mark.parametrize("made", [of_library, of_closure])
def test_a_part_of_the_batch(made):
    ids, part = documents(0), [tensor[2:4] for tensor in inputs()]
    expected = dense(ids)(*inputs())[2:4]
    torch.testing.assert_close(flex_attention(*part, block_mask=made(ids, True)[2:4]), expected)
    sent = pickle.loads(pickle.dumps(made(ids, True)[2:4]))
    torch.testing.assert_close(flex_attention(*part, block_mask=sent), expected)


class Stage(nn.Module):
    def forward(self, x, mask):
        return x + flex_attention(x, x, x, block_mask=mask)


def microbatches(group, made):
    """Of a pipeline over two ranks; torch cuts the mask."""
    stage = PipelineStage(Stage(), group.rank(), 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2)
    mask = made(documents(0), False)
    return schedule.step(*([inputs()[0]] if group.rank() == 0 else []), mask=mask)


@pytest.mark.parametrize("made", [of_library, of_closure])
def test_pipeline_microbatches(group, made):
    _, found = group.run(microbatches, made, ranks=2)
    x = inputs()[0]
    for _ in range(2):
        x = x + dense(documents(0))(x, x, x)
    torch.testing.assert_close(found, x)
