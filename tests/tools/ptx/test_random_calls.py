"""Random calls of tests/fuzz, their kernels compiled for cards and executed."""

import pytest
from hypothesis import given

from tests.fuzz import a_fixed_few, packed, plain

TARGETS = ("sm_80", "sm_90", "sm_100")
FEW = (1, pytest.param(12, marks=pytest.mark.slow))
KINDS = {"padded": (plain, plain.several_values), "packed": (packed, packed.several_batches)}


@pytest.mark.parametrize("examples", FEW)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind, target, examples):
    calls, several_of = KINDS[kind]

    @a_fixed_few(examples)
    @given(program=calls.programs(target), several=several_of(target, 2))
    def check(program, several):
        calls.check(target, program, several)

    check()
