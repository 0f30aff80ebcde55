"""A fixed few of the random calls that fuzz.py makes, in Triton's interpreter. See test_interpreted.py."""

from fuzz import a_fixed_few, check, programs, several_values
from hypothesis import given


@a_fixed_few(4)
@given(program=programs("triton"), several=several_values("triton", 2))
def test_random_calls(program, several):
    check("triton", program, several)
