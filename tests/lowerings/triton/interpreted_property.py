"""A fixed few of the random calls that tests/fuzz makes, in Triton's interpreter. See test_interpreted.py."""

from hypothesis import given

from tests.fuzz import a_fixed_few
from tests.fuzz.plain import check, programs, several_values


@a_fixed_few(1)
@given(program=programs("triton"), several=several_values("triton", 2))
def test_random_calls(program, several):
    check("triton", program, several)
