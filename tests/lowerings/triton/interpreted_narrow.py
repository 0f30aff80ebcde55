"""Keys and values of 8 bits, by Triton's interpreter. See test_interpreted.py."""

import functools

import pytest
import torch
from support import served_by

from flex_inductor import flex_attention
from flex_inductor.tools import interpret
from tests.accuracy import test_narrow
from tests.accuracy.test_narrow import E4M3, E5M2
from tests.marks import slow_but

compiled = functools.partial(interpret.compiled, dynamic=False)


CALLS = [
    (queries, dtype, narrow, scales)
    for queries in (70, 1)
    for dtype, narrow, scales in (
        (torch.float32, E4M3, "row"),
        (torch.float16, E5M2, "row"),
        (torch.float16, E4M3, "head"),
        (torch.float32, E5M2, "head"),
        (torch.float32, E4M3, "none"),
        (torch.float16, E4M3, "tensor"),
    )
]


@pytest.mark.parametrize(
    "call",
    slow_but(
        CALLS,
        (70, torch.float16, E4M3, "head"),
        (1, torch.float16, E5M2, "row"),
        (1, torch.float16, E4M3, "tensor"),
    ),
    ids=str,
)
def test_as_right_as_wide_keys(call, kinds):
    with served_by("triton"):
        test_narrow.judged(compiled, *call)
    assert kinds == (["forward"] if call[0] == 70 else ["decode", "combine"])


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [E4M3, E5M2])
def test_every_number_of_8_bits(narrow):
    """But infinity and NaN, of which Triton's interpreter makes numbers: ptx/test_attention.py has them."""
    with served_by("triton"):
        test_narrow.every_number(compiled, narrow, columns=60)


IN_SEQUENCES = [
    (p, *of) for p in test_narrow.PLACES for of in (((1, 2), torch.float32), ((33, 20), torch.float16))
]


@pytest.mark.parametrize(
    "call",
    slow_but(IN_SEQUENCES, ("paged", (1, 2), torch.float32)),
    ids=str,
)
def test_sequences(call):
    with served_by("triton"):
        test_narrow.in_sequences(compiled, *call)


@pytest.mark.parametrize("scale", slow_but([2.0**-17, 2.0**-30], 2.0**-30))
def test_values_at_the_end_of_float16s_range(scale):
    """What e5m2 holds fits into float16, and what it stands for. Weights times the scale would not."""
    query, key = torch.zeros(1, 1, 33, 16, dtype=torch.float16), torch.zeros(1, 1, 64, 16).to(E5M2)
    value = torch.full((1, 1, 64, 16), 57344.0).to(E5M2)
    for shape in ((1, 1), (1, 1, 64)):
        run = compiled(lambda *qkv, shape=shape: flex_attention(*qkv, v_scale=torch.full(shape, scale)))
        want = torch.full_like(query, 57344.0 * scale)
        torch.testing.assert_close(run(query, key, value), want, rtol=2**-10, atol=2**-24)
