"""Sinks, by Triton's interpreter. See test_interpreted.py."""

import pytest
from support import served_by

from flex_inductor.tools import interpret
from tests.accuracy.test_sinks import judged


@pytest.mark.parametrize(
    "call, kernels",
    [
        ("plain", ["forward"]),
        ("bias", ["forward"]),
        ("few", ["decode"]),
        ("few, in parts", ["decode", "combine"]),
    ],
)
def test_as_right_as_dense_attention(call, kernels, kinds):
    with served_by("triton", "triton"):
        judged(call, lambda attend: interpret.compiled(attend, dynamic=False))
    assert kinds[: len(kernels)] == kernels
