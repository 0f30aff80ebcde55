"""Every bit of calls that need no rounding, by Triton's interpreter. See test_interpreted.py."""

import pytest
from support import served_by

from flex_inductor.tools import interpret
from tests.accuracy import test_exact
from tests.accuracy.test_exact import SIZES, UNEVEN


def interpreted(attend):
    return interpret.compiled(attend, dynamic=False)


CALLS = {  # how, mask, sizes, dtype, layout
    "causal": ("last", "table", "causal", SIZES, "fp32", "contiguous"),
    "window": ("even", "keys", "window", SIZES, "fp16", "bshd"),
    "uneven": ("last", "keys", "per head", UNEVEN, "fp16", "strided"),
    "document": ("even", "table", "document", SIZES, "fp32", "head_dim_slice"),
    "one KV batch": ("last", "table", "prefix", SIZES._replace(kv_batch=1), "fp16", "head_dim_stride"),
    "few": ("even", "table", "prefix", SIZES._replace(queries=3), "fp32", "strided"),
    "few, fp16": ("last", "keys", "none", SIZES._replace(queries=2), "fp16", "contiguous"),
}


@pytest.mark.parametrize("call", CALLS)
def test_dense(call, kinds):
    with served_by("triton", "triton"):
        test_exact.check(interpreted, *CALLS[call])
    assert kinds[0] == ("decode" if call.startswith("few") else "forward")


@pytest.mark.parametrize("kind, mask", [("last", "causal"), ("even", "window")])
def test_packed(kind, mask):
    with served_by("triton", "triton"):
        test_exact.check_packed(interpreted, kind, mask, "fp16")


@pytest.mark.parametrize("kind, mask", [("last", "causal"), ("even", "window")])
def test_paged(kind, mask):
    with served_by("triton"):
        test_exact.check_paged(interpreted, kind, mask)
