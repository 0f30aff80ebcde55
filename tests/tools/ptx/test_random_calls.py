"""Random calls of tests/fuzz, their kernels compiled for cards and executed."""

import pytest
from hypothesis import given

from tests.fuzz import a_fixed_few, packed, plain

TARGETS = ("sm_80", "sm_90")
FEW = (1, pytest.param(12, marks=pytest.mark.slow))


@pytest.mark.long
@pytest.mark.parametrize("examples", FEW)
@pytest.mark.parametrize("target", TARGETS)
def test_padded(target, examples):
    @a_fixed_few(examples)
    @given(program=plain.programs(target), several=plain.several_values(target, 2))
    def check(program, several):
        plain.check(target, program, several)

    check()


@pytest.mark.long
@pytest.mark.parametrize("examples", FEW)
@pytest.mark.parametrize("target", TARGETS)
def test_packed(target, examples):
    @a_fixed_few(examples)
    @given(program=packed.programs(target), several=packed.several_batches(target, 2))
    def check(program, several):
        packed.check(target, program, several)

    check()
