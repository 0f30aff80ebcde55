"""FlopCounterMode counts the matrix products of the op, and what a block mask leaves out is not counted."""

import pytest
import torch
from op.calls import qkv
from torch.utils.flop_counter import FlopCounterMode

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.op import Inputs, attention, attention_backward
from flex_inductor.visits import BlockRuns


def count(inputs, **call):
    with FlopCounterMode(display=False) as counter:
        flex_attention(*inputs, **call).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert set(counted) == {attention, attention_backward}  # and none of the operations they are made of
    return counted[attention], counted[attention_backward]


def test_two_products_forward_and_five_backward():
    B, H, M, N, D, V = 2, 4, 6, 8, 3, 5
    q, k, v = (
        torch.randn(B, heads, length, dim, requires_grad=True)
        for heads, length, dim in ((H, M, D), (2, N, D), (2, N, V))
    )
    product = 2 * B * H * M * N
    assert count((q, k, v), enable_gqa=True) == (product * (D + V), product * (3 * D + 2 * V))


def test_a_mod_with_a_parameter():
    """Counting sets hooks for all modules, which the mod's graph is not to meet."""
    q, k, v = qkv()
    slopes = torch.ones(q.size(1), dtype=q.dtype, requires_grad=True)
    counted = count((q, k, v), score_mod=lambda score, b, h, q_idx, kv_idx: score * slopes.exp()[h])
    assert counted == count((q, k, v)) and slopes.grad is not None


@pytest.mark.parametrize("compact", [False, True], ids=["lists", "runs"])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 3)])
def test_blocks_left_out_are_not_counted(batch, heads, compact):
    mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) | (b + h > 9),
        batch,
        heads,
        10,
        10,
        "cpu",
        BLOCK_SIZE=4,
        compact=compact,
    )
    visited = 4 * 4 + 4 * 8 + 2 * 10  # rows times columns: blocks are 4, 4 and 2 long
    forward, backward = count(qkv(2, 3, 10, 4), block_mask=mask)
    assert forward == 2 * 2 * 3 * visited * (4 + 4)
    assert backward == 2 * 2 * 3 * visited * (5 * 4)


def test_tiles_of_sequences_have_as_many_tokens_as_they_hold():
    sequences = Sequences.from_lengths([10, 0, 3])
    mask = sequences.mask(lambda b, h, q, kv: q >= kv, block_size=4)
    q, k, v = (torch.randn(13, 2, 4) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        varlen_attention(q, k, v, sequences, None, mask)
    visited = 4 * 4 + 4 * 8 + 2 * 10 + 3 * 3
    assert counter.get_total_flops() == 2 * 2 * visited * (4 + 4)


def test_everything_is_counted_where_block_lists_have_no_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 8, 8, "cpu", BLOCK_SIZE=4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        lists = [None if t is None else mode.from_tensor(t) for t in mask.as_tuple()[2:10]]
        q, k, v = (mode.from_tensor(t) for t in qkv(1, 1, 8, 4))
        with FlopCounterMode(display=False) as counter:
            attention(
                q, k, v, None, mask.mask_mod, 1.0, Inputs(schedule=BlockRuns.of((4, 4), lists, of_one=True))
            )
    assert counter.get_total_flops() == 2 * 8 * 8 * (4 + 4)
