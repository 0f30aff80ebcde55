"""create_block_mask gives what torch's gives, on masks written by hand and on generated ones."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from mask_helpers import compare, small_steps
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor import FlexError
from flex_inductor.masks.analysis.trace import trace_mask
from flex_inductor.masks.library.blockmask import HAS_WRITE_ORDER, create_block_mask

GENERATOR = torch.Generator().manual_seed(5)


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR).to(dtype)


SORTED = integers(6, 700).sort().values
UNSORTED = integers(6, 700, low=-3)
RARE = integers(400, 700)
DISTINCT = torch.randperm(700, generator=GENERATOR)
PER_BATCH = integers(6, 3, 700).sort(dim=-1).values
DENSE = torch.rand(700, 700, generator=GENERATOR) < 0.01
RELATIVE = torch.rand(1401, generator=GENERATOR) < 0.5
SMALL = integers(127, 700, dtype=torch.int8, low=-128)
BYTES = integers(256, 700, dtype=torch.uint8)
NOISE = torch.randn(700, generator=GENERATOR)
NOISE_WITH_NAN = torch.where(NOISE > 1, torch.nan, NOISE)
STARTS = torch.tensor([0, 100, 101, 350, 699])
WINDOW = torch.tensor(50)
LONE = torch.zeros(700, dtype=torch.int64)
LONE[[127, 255, 300, 639, 699]] = 1


def in_place(b, h, q, kv):
    keep = q >= kv
    keep &= q - kv < 77
    return keep


MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 200),
    "prefix": lambda b, h, q, kv: (kv < 300) | (q >= kv),
    "one side": lambda b, h, q, kv: kv < 300,
    "nothing": lambda b, h, q, kv: kv < 0,
    "everything": lambda b, h, q, kv: kv >= 0,
    "constant": lambda b, h, q, kv: torch.ones((), dtype=torch.bool),
    "sorted documents": lambda b, h, q, kv: (SORTED[q] == SORTED[kv]) & (q >= kv),
    "unsorted, negative ids": lambda b, h, q, kv: UNSORTED[q] == UNSORTED[kv],
    "ids that seldom meet": lambda b, h, q, kv: RARE[q] == RARE[kv],
    "distinct ids": lambda b, h, q, kv: (DISTINCT[q] == DISTINCT[kv]) | (kv < 3),
    "ids that never meet": lambda b, h, q, kv: DISTINCT[q] * 2 != DISTINCT[kv] * 2 + 1,
    "ids of two dtypes": lambda b, h, q, kv: RARE[q] == SMALL[kv],
    "negative indices": lambda b, h, q, kv: SORTED[-q - 1] == SORTED[kv - 700],
    "index that changes sign": lambda b, h, q, kv: RELATIVE[q - kv],
    "relative table": lambda b, h, q, kv: RELATIVE[q - kv + 700],
    "dense capture": lambda b, h, q, kv: DENSE[q, kv],
    "dense capture, transposed": lambda b, h, q, kv: DENSE[kv, q] | DENSE[q // 2, kv],
    "nested gather": lambda b, h, q, kv: SORTED[RARE[q]] == SORTED[kv],
    "joint nested gather": lambda b, h, q, kv: RELATIVE[SORTED[q] * 9 + SORTED[kv]],
    "batch": lambda b, h, q, kv: PER_BATCH[b, q] == PER_BATCH[b, kv],
    "heads": lambda b, h, q, kv: (q - kv < 60 * (h + 1)) & (q >= kv),
    "batch and heads": lambda b, h, q, kv: (q - kv < 60 * (h + 1)) & (PER_BATCH[b, q] == PER_BATCH[b, kv]),
    "batch alone": lambda b, h, q, kv: b > 0,
    "hash": lambda b, h, q, kv: ((q * 7919) ^ (kv * 104729)) % 97 < 1,
    "int8 wraps": lambda b, h, q, kv: SMALL[q] + SMALL[kv] > 100,
    "uint8 wraps": lambda b, h, q, kv: BYTES[q] - BYTES[kv] < 3,
    "int64 wraps": lambda b, h, q, kv: (q.long() * 2**55 - kv.long() * 2**55) > 0,
    "int64 to int8": lambda b, h, q, kv: (q - kv).to(torch.int8) > 100,
    "negative divisor": lambda b, h, q, kv: (q - kv) // -7 % -5 == -2,
    "divisor that varies": lambda b, h, q, kv: (q * 9) // (kv + 1) == 3,
    "shift": lambda b, h, q, kv: (q >> 6) == (kv >> 6),
    "wide shift": lambda b, h, q, kv: ((q.long() + 1) << (kv % 70)) > 2**40,
    "float distance": lambda b, h, q, kv: (q - kv).abs() * 0.3 < 50.5,
    "float ratio": lambda b, h, q, kv: q / (kv + 1) < 1.7,
    "square": lambda b, h, q, kv: (q - kv) ** 2 < 12345,
    "noise": lambda b, h, q, kv: NOISE[q] * NOISE[kv] > 2,
    "nan": lambda b, h, q, kv: NOISE_WITH_NAN[q] >= NOISE[kv] - 99,
    "not nan": lambda b, h, q, kv: ~(NOISE_WITH_NAN[q] + NOISE_WITH_NAN[kv] < -9),
    "where": lambda b, h, q, kv: torch.where(kv < 90, q - kv, kv - q) > 40,
    "clamp": lambda b, h, q, kv: (q - kv).clamp(-20, 20) == (kv % 64) - 20,
    "clamp to a capture": lambda b, h, q, kv: (q - kv).clamp(max=WINDOW) > 40,
    "lone entries": lambda b, h, q, kv: LONE[q] + LONE[kv] == 0,
    "no rule": lambda b, h, q, kv: torch.sin(q - kv) > 0.9,
    "counted starts": lambda b, h, q, kv: (q >= STARTS).sum() == (kv >= STARTS).sum(),
    "joint vector": lambda b, h, q, kv: ((q - kv) == STARTS).any(),
    "item of a capture": lambda b, h, q, kv: q - kv < STARTS[1].item(),
    "in place": in_place,
    "one argument with a default": lambda b, h, q, kv, w=9: q - kv < w,
}
SHAPES = {
    "whole tiles": (640, 640, 128),
    "odd": (700, 601, 128),
    "rectangular": (512, 700, (64, 32)),
    "wide and short": (99, 700, (16, 256)),
    "one tile": (7, 5, 128),
    "one row": (1, 700, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("levels", ["one level", "many levels"])
def test_equals_torch(levels, mask, shape):
    B, H = (3, 2) if shape in ("odd", "rectangular") else (None, None)
    if B is None and mask.startswith(("batch", "heads")):
        B, H = 1, 1
    with small_steps() if levels == "many levels" else contextlib.nullcontext():
        compare(MASKS[mask], B, H, *SHAPES[shape])


MOST = 2**31 - 1
BEYOND_INT32 = {
    "sum": lambda b, h, q, kv: q + MOST < kv,
    "difference": lambda b, h, q, kv: q - MOST - kv > 0,
    "sum of products": lambda b, h, q, kv: q * 2_000_000 + kv * 2_000_000 < 0,
    "product": lambda b, h, q, kv: q * 100_000_000 < kv,
    "product of both": lambda b, h, q, kv: (q * 5000) * (kv * 5000) < 0,
    "square": lambda b, h, q, kv: (q * 100) ** 2 < -kv,
    "shift": lambda b, h, q, kv: q << 24 < kv,
    "shift by an index": lambda b, h, q, kv: q << kv % 32 < 0,
    "minus the least": lambda b, h, q, kv: (q < 9) & (-(kv - MOST - 1) < 0),
    "distance from the least": lambda b, h, q, kv: (q < 9) & ((kv - MOST - 1).abs() < 0),
    "one side": lambda b, h, q, kv: (q >= kv) & (kv * 10_000_000 >= 0),
    "on its way": lambda b, h, q, kv: (q * 100_000_000 - q * 100_000_000 + q + MOST) // 2 < kv,
    "untraceable": lambda b, h, q, kv: q + MOST + STARTS[0].item() < kv,
}


@pytest.mark.parametrize("shape", ["odd", "rectangular", "one tile"])
@pytest.mark.parametrize("mask", BEYOND_INT32)
def test_integers_beyond_int32_are_those_of_torch(mask, shape):
    with small_steps():
        compare(BEYOND_INT32[mask], None, None, *SHAPES[shape])


@pytest.mark.parametrize("compiled", [False, True])
def test_an_integer_beyond_the_indices_is_refused(compiled):
    def make():
        return create_block_mask(lambda b, h, q, kv: kv < 2**33, None, None, 64, 64, "cpu", 16)

    if compiled:
        make = torch.compile(make, backend="eager", fullgraph=True)
    with pytest.raises(
        FlexError, match=r"mask_mod .*computes in int32 with the number 8589934592, .*kv_idx\.long\(\)"
    ):
        make()


@pytest.mark.parametrize("mask", ["causal", "heads", "sorted documents"])
def test_without_full_blocks(mask):
    if "separate_full_blocks" not in inspect.signature(torch_create_block_mask).parameters:
        pytest.skip("this torch always separates full blocks")
    compare(MASKS[mask], 2, 3, 700, 640, separate_full_blocks=False)


@pytest.mark.skipif(not HAS_WRITE_ORDER, reason="this torch has no write order")
@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("mask", ["causal", "heads", "batch"])
def test_write_order(mask, order):
    options = {"device": "cpu", "BLOCK_SIZE": 64, "compute_dq_write_order": True, "dq_kv_order": order}
    ours, reference = (
        f(MASKS[mask], 2, 2, 600, 700, **options) for f in (create_block_mask, torch_create_block_mask)
    )
    assert ours.dq_kv_order_spt == reference.dq_kv_order_spt == order
    for name, counts in (("dq_write_order", "q_num_blocks"), ("dq_write_order_full", "full_q_num_blocks")):
        a, b = getattr(ours, name), getattr(reference, name)
        used = torch.arange(a.shape[-1]) < getattr(reference, counts)[..., None]
        assert a.shape == b.shape and (used.any() or name.endswith("full"))
        assert torch.equal(a[used], b[used])


def test_empty_sequences():
    for lengths in ((0, 256), (256, 0), (0, 0)):
        compare(MASKS["causal"], 2, 2, *lengths)


def test_stride_zero_where_the_mask_does_not_depend():
    heads = create_block_mask(MASKS["heads"], 4, 3, 512, 512, device="cpu")
    assert heads.kv_indices.stride()[0] == 0 and heads.kv_indices.stride()[1] > 0
    causal = create_block_mask(MASKS["causal"], 4, 3, 512, 512, device="cpu")
    assert causal.kv_indices.stride()[:2] == (0, 0)


LENGTH = 300
CAPTURES = {
    "sorted": SORTED[:LENGTH],
    "unsorted": UNSORTED[:LENGTH],
    "small": SMALL[:LENGTH],
    "bytes": BYTES[:LENGTH],
    "noise": NOISE[:LENGTH],
}
NUMBERS = st.sampled_from([-300, -64, -7, -1, 1, 2, 5, 16, 64, 100, 127, 128, 300])


def numeric(depth: int):
    """Source text of an integer or float expression of b, h, q and kv."""
    leaf = st.one_of(
        st.sampled_from(["q", "kv", "q", "kv", "b", "h"]),
        st.sampled_from(
            [f"C[{name!r}][{index}]" for name in CAPTURES for index in ("q", "kv", "q // 2", "kv - 300")]
        ),
    )
    if depth == 0:
        return leaf
    inner = numeric(depth - 1)
    return st.one_of(
        leaf,
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//", "%"]), NUMBERS),
        st.builds("({} - {})".format, NUMBERS, inner),
        st.builds("({}).abs()".format, inner),
        st.builds("torch.minimum({}, {})".format, inner, inner),
        st.builds("({}).clamp({}, {})".format, inner, st.integers(-40, 0), st.integers(1, 90)),
        st.builds("torch.where({}, {}, {})".format, boolean(depth - 1), inner, inner),
        st.builds(
            "({}).to(torch.{})".format, inner, st.sampled_from(["int8", "uint8", "int32", "float32", "int64"])
        ),
    )


def boolean(depth: int):
    inner = numeric(depth)
    compared = st.builds(
        "({} {} {})".format,
        inner,
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
        st.one_of(inner, NUMBERS),
    )
    if depth == 0:
        return compared
    nested = boolean(depth - 1)
    return st.one_of(
        compared,
        st.builds("({} {} {})".format, nested, st.sampled_from(["&", "|", "^"]), nested),
        st.builds("(~{})".format, nested),
    )


BLOCKS = st.one_of(
    st.sampled_from([16, 32, 64, 128, 256]),
    st.tuples(st.sampled_from([16, 48, 64, 256]), st.sampled_from([16, 40, 128, 256])),
)


def check_generated(source: str, q_len: int, kv_len: int, block, B, H, deep: bool) -> None:
    mask_mod = eval(f"lambda b, h, q, kv: {source}", {"C": CAPTURES, "torch": torch})
    # A mask that reads b or h needs their sizes; one of 1 is what torch takes None for.
    try:
        reads = trace_mask(mask_mod, torch.device("cpu")).reads
    except FlexError as error:
        assert "int8 holds" in str(error)  # the numbers are small
        reject()
    B, H = 1 if B is None and "b" in reads else B, 1 if H is None and "h" in reads else H
    with small_steps() if deep else contextlib.nullcontext():
        compare(mask_mod, B, H, q_len, kv_len, block)


generated = given(
    source=boolean(2),
    q_len=st.integers(1, LENGTH),
    kv_len=st.integers(1, LENGTH),
    block=BLOCKS,
    B=st.sampled_from([None, 2]),
    H=st.sampled_from([None, 3]),
    deep=st.booleans(),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@generated
def test_generated_masks(source, q_len, kv_len, block, B, H, deep):
    check_generated(source, q_len, kv_len, block, B, H, deep)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@generated
def test_many_generated_masks(source, q_len, kv_len, block, B, H, deep):
    check_generated(source, q_len, kv_len, block, B, H, deep)
