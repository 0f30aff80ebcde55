"""Sinks and dropout, by Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from support import served_by

from flex_inductor import Sequences, flex_attention, varlen_attention
from flex_inductor.tools import interpret
from tests.accuracy import test_dropout, test_entropy, test_sinks
from tests.accuracy.test_dropout import P, kept, shown, state


@pytest.mark.parametrize(
    "call, kernels",
    [
        ("plain", ["forward"]),
        ("bias", ["forward"]),
        ("few", ["decode"]),
        ("few, in parts", ["decode", "combine"]),
    ],
)
@pytest.mark.parametrize("of", [test_sinks, test_dropout], ids=["sinks", "dropout"])
def test_as_right_as_dense_attention(of, call, kernels, kinds):
    with served_by("triton", "triton"):
        of.judged(call, lambda attend: interpret.compiled(attend, dynamic=False))
    assert kinds[: len(kernels)] == kernels


@pytest.mark.parametrize("tile", [(16, 16), (64, 32)])
def test_every_tiling_keeps_the_same(tile):
    hints = {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}

    def call(*qkv):
        return flex_attention(*qkv, kernel_options=hints, dropout_p=P, rng_state=state())

    run = interpret.compiled(call, dynamic=False)
    assert torch.equal(shown(run, 1, 2, 70, 60), kept((1, 2, 70, 60)) > 0)


@pytest.mark.parametrize("keys", [[30, 1, 90], [40, 7, 95]])
def test_packed_sequences_lose_what_they_lose_uncompiled(keys):
    """Where lengths differ, tiles of queries begin anywhere among a counter's rows."""
    sequences = Sequences.from_lengths([30, 1, 90], keys if keys[1] > 1 else None)
    query, key, value = (torch.randn(n, 2, 16, requires_grad=True) for n in (121, sum(keys), sum(keys)))

    def call(*qkv):
        return varlen_attention(*qkv, sequences, dropout_p=P, rng_state=state())

    got, want = interpret.compiled(call, dynamic=False)(query, key, value), call(query, key, value)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", test_entropy.CALLS)
def test_entropy_of_rows(call, kinds):
    with served_by("triton", "triton"):
        test_entropy.judged(call, lambda attend: interpret.compiled(attend, dynamic=False))


@pytest.mark.parametrize("sizes", [test_entropy.SIZES, test_entropy.FEW], ids=["many", "few"])
def test_first_of_the_largest(sizes, kinds):
    with served_by("triton"):
        test_entropy.largest(lambda call: interpret.compiled(call, dynamic=False), sizes)


@pytest.mark.parametrize("sizes", [test_entropy.SIZES, test_entropy.FEW], ids=["many", "few"])
@pytest.mark.parametrize("check", test_entropy.LARGE)
def test_scores_that_are_large(check, sizes, kinds):
    with served_by("triton"):
        test_entropy.LARGE[check](lambda call: interpret.compiled(call, dynamic=False), sizes)


def test_entropy_of_packed_sequences():
    with served_by("triton", "triton"):
        test_entropy.packed(lambda call: interpret.compiled(call, dynamic=False))
