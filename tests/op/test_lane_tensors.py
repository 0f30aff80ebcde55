"""Mods that hold a tensor for each score, such as the two rows of a dot product: right, and in bounded memory."""

import pytest
import torch
from op.calls import close, draw, parameter
from torch.utils._python_dispatch import TorchDispatchMode

import flex_inductor
from flex_inductor import FlexError, create_block_mask, flex_attention
from flex_inductor.op.eager import chunked, tiles

LENGTH, DIM = 24, 8


def transformer_xl(query, table):
    """The score of the query with what stands for the distance, as in Transformer-XL."""
    return lambda s, b, h, i, j: s + (query[b, h, i] * table[h, i - j]).sum()


def dense(q, k, v, query, table):
    i = torch.arange(LENGTH)
    distances = torch.einsum("bhid,hijd->bhij", query, table[:, i[:, None] - i])
    score = q @ k.mT * DIM**-0.5 + distances
    return torch.softmax(score.masked_fill(i[:, None] < i, -torch.inf), -1) @ v


@pytest.fixture(scope="module")
def call():
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    inputs = [parameter(2, 2, LENGTH, DIM) for _ in range(4)] + [parameter(2, 2 * LENGTH, DIM)]

    def attend(q, k, v, query, table):
        return flex_attention(q, k, v, transformer_xl(query, table), mask)

    expected = dense(*inputs)
    return attend, inputs, expected, torch.autograd.grad(expected.sin().sum(), inputs)


def test_compiled(call):
    attend, inputs, expected, grads = call
    flex_inductor.decisions(clear=True)
    out = torch.compile(attend, backend="flex_inductor", fullgraph=True)(*inputs)
    close(out, expected)
    close(torch.autograd.grad(out.sin().sum(), inputs), grads)
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["chunked", "chunked"]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any op makes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                self.size = max(self.size, tensor.numel())
        return result

    def watched(self, function):
        def run(*args):
            with self:
                return function(*args)

        return run


def test_memory_is_bounded(call, monkeypatch):
    """A tile holds no more than was allowed, captured tensors aside, and gives what larger tiles give."""
    attend, inputs, expected, grads = call
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", 2000)
    largest = Largest()
    for name in ("forward", "backward"):
        monkeypatch.setattr(chunked, name, largest.watched(getattr(chunked, name)))
    out = attend(*inputs)
    close(out, expected)
    close(torch.autograd.grad(out.sin().sum(), inputs), grads)
    assert 1000 < largest.size <= max(2000, *(tensor.numel() for tensor in inputs))


def test_a_tensor_that_is_too_large(monkeypatch):
    monkeypatch.setattr(tiles, "MAX_LANE_ELEMENTS", 7)
    q, k, v, query, table = (draw(1, 1, 4, DIM) for _ in range(5))
    message = (
        r"^score_mod makes a tensor of 8 elements for every score; at most 7 are served\. Compute it before the call "
        r"for all positions, capture the result as a table, and look single numbers up in score_mod\.$"
    )
    with pytest.raises(FlexError, match=message):
        flex_attention(q, k, v, transformer_xl(query, table[0]))
