"""Lanes of captured tensors, in all dtypes that are loaded as vectors: none is computed by itself."""

import re

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code

from flex_inductor import create_block_mask, flex_attention
from tests.lowerings.cpu.helpers import fused
from tests.support import attention_of, dense_of, judge

SIZE = 45


def matrices():
    """One of each dtype, with zeros in some places."""
    torch.manual_seed(0)
    of_ints = torch.randint(-2, 3, (SIZE, SIZE))
    dtypes = [
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
    ]
    return [
        of_ints > 0,
        (of_ints + 2).to(torch.uint8),
        *(of_ints.roll(i, 0).to(d) for i, d in enumerate(dtypes)),
    ]


MATRICES = matrices()


def of_conditions(b, h, q_idx, kv_idx):
    """A mask of comparisons, conversions and logical functions."""
    flags, bytes_, chars, ints, longs, floats, doubles, brains, halves = (m[q_idx, kv_idx] for m in MATRICES)
    first = (flags ^ (bytes_ > 2)) | ((chars <= -1) & (bytes_ != 2)) | (ints == 2) | ~(longs >= -1)
    second = (
        chars.bool()
        | torch.logical_and(bytes_, ints)
        | torch.logical_not(longs)
        | torch.logical_xor(chars, flags)
    )
    third = (floats != 1) | (doubles < 0) | (brains > 0) | (halves.bool() & (bytes_ != chars))
    return first & second & third


def of_numbers(score, b, h, q_idx, kv_idx):
    """A bias of all of them, and scores that are no numbers left out."""
    _, bytes_, chars, ints, longs, floats, doubles, brains, halves = (m[q_idx, kv_idx] for m in MATRICES)
    biased = score + bytes_ * 0.1 - chars * 0.2 + ints * 0.3 - longs * 0.4 + floats + brains * 0.5 - halves
    holed = torch.where(longs > 1, torch.inf, torch.where(chars < -1, torch.nan, biased + doubles))
    return torch.where(torch.isnan(holed) | torch.isinf(holed), score * (q_idx >= kv_idx), holed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_lane_is_computed_by_itself(dtype):
    mask = create_block_mask(of_conditions, None, None, SIZE, SIZE, "cpu")
    inputs = [torch.randn(1, 2, SIZE, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    attend = fused(lambda *tensors: flex_attention(*tensors, score_mod=of_numbers, block_mask=mask))
    _, code = run_fw_bw_and_get_code(lambda: attend(*inputs))
    for kernel in code:
        assert "LaneMask<" in kernel and not any(slow in kernel for slow in ("tmpbuf", "decltype(tmp"))
    judge(
        fused(attention_of(lambda: of_numbers), dynamic=False), dense_of(lambda: of_numbers), inputs, (), mask
    )


def scattered():
    """Numbers of places, and tables of several dtypes for two of them."""
    torch.manual_seed(1)
    kinds, order = torch.randint(-5, 5, (2, SIZE)), torch.randperm(SIZE).int()
    table = torch.randn(5, 5)
    return kinds, order, table, table > -0.5, (table * 3).int(), (table * 3).long()


KINDS, ORDER, TABLE, ALLOWED, INTS, LONGS = scattered()
FLAGS, STEPS = torch.arange(13) % 3 == 0, torch.arange(13) % 2
POSITIONS, OF_HEADS = torch.randn(2, SIZE, 3), torch.randn(SIZE, 2)


def of_kinds(b, h, q_idx, kv_idx):
    query, key = KINDS[b, q_idx], KINDS[b, kv_idx]
    of_order = KINDS[0, ORDER[q_idx]] != KINDS[0, ORDER[kv_idx]]
    of_columns = FLAGS[q_idx % 7 - kv_idx % 7 + 6] & (STEPS[q_idx % 7 - kv_idx % 7 + 6] > 0)
    return of_columns | ALLOWED[query, key] | (INTS[query, key] == 1) | (LONGS[query, key] < -1) | of_order


def of_places(score, b, h, q_idx, kv_idx):
    """A bias for two kinds, and for how far apart places are."""
    apart = (POSITIONS[b, q_idx, 0] - POSITIONS[b, kv_idx, 0]).abs() + POSITIONS[0, kv_idx, 2]
    return score + TABLE[KINDS[b, q_idx], KINDS[b, kv_idx]] - apart + OF_HEADS[kv_idx, h]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scattered_lanes_are_gathered(dtype):
    mask = create_block_mask(of_kinds, 2, None, SIZE, SIZE, "cpu")
    inputs = [torch.randn(2, 2, SIZE, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    attend = fused(lambda *tensors: flex_attention(*tensors, score_mod=of_places, block_mask=mask))
    _, code = run_fw_bw_and_get_code(lambda: attend(*inputs))
    for kernel in code:
        whole = "".join(re.findall(r"C10_LIKELY(.*?)C10_UNLIKELY", kernel, re.DOTALL))
        assert "look_up(" in whole and not re.search(r"tmpbuf\[\w+\] = in_", whole)
    judge(
        fused(attention_of(lambda: of_places), dynamic=False), dense_of(lambda: of_places), inputs, (), mask
    )
