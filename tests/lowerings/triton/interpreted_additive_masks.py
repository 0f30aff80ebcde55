"""Masks by a large negative number that a score_mod adds, by Triton's interpreter. See test_interpreted.py."""

import functools

import pytest
import torch
from marks import slow_but
from support import served_by

from flex_inductor.tools import interpret
from tests.accuracy.test_additive_masks import NUMBERS, judged

LEAST, _, BILLION, FEW = NUMBERS
KERNELS = {
    "many": ["forward", "backward_dq", "backward_dkdv"],
    "sinks": ["forward", "backward_dq", "backward_dkdv"],
    "few": ["decode", "combine", "backward_dq", "backward_dkdv"],
    "few, all padding": ["decode", "combine", "backward_dq", "backward_dkdv"],
    "packed": ["forward", "backward_dq", "backward_dkdv"],
}
CASES = [
    (call, number, dtype)
    for call in KERNELS
    for number in NUMBERS
    for dtype in (torch.float32, torch.float16)
]
compiled = functools.partial(interpret.compiled, dynamic=False)


@pytest.mark.parametrize(
    "case",
    slow_but(
        CASES,
        ("many", LEAST, torch.float16),
        ("sinks", FEW, torch.float32),
        ("few", LEAST, torch.float32),
        ("few, all padding", LEAST, torch.float16),
        ("packed", LEAST, torch.float16),
        ("packed", BILLION, torch.float32),
    ),
    ids=str,
)
def test_as_right_as_a_dense_softmax(case, kinds):
    with served_by("triton", "triton"):
        judged(*case, compiled)
    assert kinds == KERNELS[case[0]]


def test_gradients_whose_bits_do_not_depend_on_the_order(kinds):
    torch.use_deterministic_algorithms(True)
    try:
        judged("many", LEAST, torch.float32, compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kinds == ["forward", "backward_magnitudes", "backward_dq", "backward_dkdv"]


def test_wide_heads(kinds):
    judged("many", LEAST, torch.float16, compiled, sizes=(70, 80, 80), head_dim=136)
    assert kinds == ["forward", "backward_dq", "backward_dk", "backward_dv"]
