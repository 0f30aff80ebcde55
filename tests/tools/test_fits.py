"""The config that an untuned call gets has room in every card's shared memory, by what Triton allocates."""

import itertools
import re

import pytest

from flex_inductor.tools.fits import DOORS, DTYPES, HEAD_DIMS, Fit, fits, page
from flex_inductor.tools.resources import TARGETS

BACKWARD = ("plain", "captured", "packed")
# Where there is little room, or was none.
QUICK = [
    ("sm_80", "paged", "bf16", 64),
    ("sm_90", "captured", "bf16", 128),
    ("sm_100", "plain", "bf16", 256),
    ("sm_120", "plain", "fp16", 256),
    ("sm_86", "paged_decode", "fp32", 256),
]


def assert_fit(card, door, dtype, head_dim):
    found = fits(card, door, dtype, head_dim)
    kernels = {fit.kernel for fit in found}
    first = {"forward"} if door not in ("decode", "paged_decode") else {"decode"}
    assert first <= kernels, kernels
    assert door not in BACKWARD or {"backward_dq"} <= kernels
    assert [fit for fit in found if fit.room < 0] == []


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_calls_with_little_room(case):
    assert_fit(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*itertools.product(TARGETS, DOORS, DTYPES)], ids=str)
def test_every_call_on_every_card(case):
    for head_dim in HEAD_DIMS:
        assert_fit(*case, head_dim)


def test_the_page_has_the_worst_of_each_kernel():
    found = [
        Fit("sm_86", "plain", "bf16", 64, "forward", 40_000, 168, 8),
        Fit("sm_86", "paged", "fp32", 256, "forward", 90_000, 255, 24),
        Fit("sm_86", "plain", "fp32", 256, "chunked"),
    ]
    text = page(found)
    assert "## sm_86: 101,376 bytes of shared memory" in text
    assert "| forward | 2 | 90,000 (paged D256 fp32) | 255 | 24 (paged D256 fp32; 1 of 2 spill) |" in text
    assert "In chunks, because no kernel serves them: plain D256 fp32." in text


def test_the_page_keeps_the_parts_of_other_cards():
    before = page(
        [
            Fit("sm_80", "plain", "bf16", 64, "forward", 40_000, 168),
            Fit("gfx942", "plain", "bf16", 64, "forward", 1_111),
        ]
    )
    text = page(
        [
            Fit("sm_90", "plain", "bf16", 64, "forward", 50_000, 128),
            Fit("gfx942", "plain", "bf16", 64, "forward", 2_222),
        ],
        before,
    )
    assert re.findall(r"## (\w+):", text) == ["sm_80", "sm_90", "gfx942"]
    assert "40,000 (plain D64 bf16)" in text and "50,000 (plain D64 bf16)" in text
    assert "1,111" not in text and "2,222" in text
    assert page([], text) == text
