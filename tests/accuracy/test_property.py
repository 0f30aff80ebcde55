"""Random mods, masks, shapes, layouts and tilings against the fp64 reference: a fixed few of what tests/fuzz makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_inductor.op.eager import tiles
from tests.fuzz import a_fixed_few, packed
from tests.fuzz.plain import check, programs, several_values


@a_fixed_few(40)
@given(
    program=programs("eager"),
    several=several_values("eager", 1),
    tiling=st.tuples(st.integers(1, 2000), st.integers(1, 24), st.integers(1, 24)),
)
def test_eager(program, several, tiling):
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in zip(
            ("CHUNK_ELEMENTS", "MAX_CHUNK_QUERIES", "MAX_CHUNK_KEYS"), tiling, strict=True
        ):
            patch.setattr(tiles, limit, value)
        # A few tiles each way: tiles of one element would be thousands in a long call.
        few = 6 * min(tiling)
        several = [v._replace(queries=min(v.queries, few), keys=min(v.keys, few)) for v in several]
        check("eager", program, several)


@a_fixed_few(3)
@given(program=programs("cpu"), several=several_values("cpu", 3))
def test_fused_on_cpu(program, several):
    check("cpu", program, several)


@a_fixed_few(2)
@given(program=programs("cpu"), several=several_values("cpu", 3))
def test_verify_raises_no_alarm(program, several):
    check("cpu", program, several, verify=True)


@a_fixed_few(15)
@given(program=packed.programs("eager"), several=packed.several_batches("eager", 1))
def test_packed_eager(program, several):
    packed.check("eager", program, several)


@a_fixed_few(1)
@given(program=packed.programs("cpu"), several=packed.several_batches("cpu", 3))
def test_packed_on_cpu(program, several):
    packed.check("cpu", program, several)
