"""Every interval rule encloses every value of its operation, near the ends of each dtype too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flex_inductor.masks.analysis.interval_rules import RULES, bound
from flex_inductor.masks.analysis.intervals import FLOAT_DTYPES, INT_DTYPES, Interval

aten = torch.ops.aten
GROUPS, MEMBERS = 6, 5

BINARY = [
    (aten.add.Tensor, {}),
    (aten.sub.Tensor, {}),
    (aten.mul.Tensor, {}),
    (aten.minimum.default, {}),
    (aten.maximum.default, {}),
    (aten.div.Tensor, {}),
    (aten.eq.Tensor, {}),
    (aten.ne.Tensor, {}),
    (aten.lt.Tensor, {}),
    (aten.le.Tensor, {}),
    (aten.gt.Tensor, {}),
    (aten.ge.Tensor, {}),
    (aten.logical_and.default, {}),
    (aten.logical_or.default, {}),
    (aten.logical_xor.default, {}),
    (aten.clamp_min.Tensor, {}),
    (aten.clamp_max.Tensor, {}),
    (aten.rsub.Tensor, {}),
]
DIVISIONS = [
    (aten.floor_divide.default, {}),
    (aten.div.Tensor_mode, {"rounding_mode": "floor"}),
    (aten.div.Tensor_mode, {"rounding_mode": "trunc"}),
    (aten.remainder.Tensor, {}),
    (aten.fmod.Tensor, {}),
]
BITWISE = [
    (aten.bitwise_and.Tensor, {}),
    (aten.bitwise_or.Tensor, {}),
    (aten.bitwise_xor.Tensor, {}),
]
SHIFTS = [
    (aten.bitwise_left_shift.Tensor, {}),
    (aten.bitwise_right_shift.Tensor, {}),
]
UNARY = [
    (aten.neg.default, {}),
    (aten.abs.default, {}),
    (aten.sign.default, {}),
    (aten.square.default, {}),
    (aten.logical_not.default, {}),
    (aten.clone.default, {}),
    (aten.relu.default, {}),
]
ROUNDINGS = [
    (aten.floor.default, {}),
    (aten.ceil.default, {}),
    (aten.trunc.default, {}),
    (aten.round.default, {}),
]
OTHER_NAMES = {
    aten.__and__: aten.bitwise_and,
    aten.__or__: aten.bitwise_or,
    aten.__xor__: aten.bitwise_xor,
    aten.__lshift__: aten.bitwise_left_shift,
    aten.__rshift__: aten.bitwise_right_shift,
    aten.alias: aten.clone,
    aten.detach: aten.clone,
    aten.lift_fresh_copy: aten.clone,
}
CASTS = (torch.bool, *INT_DTYPES, *FLOAT_DTYPES)


def name(case) -> str:
    op, kwargs = case
    return str(op).removeprefix("aten.") + "".join(f"-{v}" for v in kwargs.values())


@st.composite
def groups(draw, dtype: torch.dtype, nonzero: bool = False, special: bool = True) -> torch.Tensor:
    """A [GROUPS, MEMBERS] tensor: each group's values lie close together, or all over the dtype."""
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=30, max_size=30))).view(GROUPS, MEMBERS)
    if dtype in FLOAT_DTYPES:
        width = {2: 16, 4: 32, 8: 64}[dtype.itemsize]
        extra = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]) if special else st.just(1.0)
        if dtype == torch.bfloat16:
            width = 32
        kind = st.one_of(
            st.floats(-100, 100, width=min(width, 32)), st.floats(width=width, allow_nan=special), extra
        )
        calm = draw(st.booleans())
        kind = st.floats(-100, 100, width=32) if calm else kind
        numbers = draw(st.lists(kind, min_size=30, max_size=30))
        made = torch.tensor(numbers, dtype=torch.float64).to(dtype).view(GROUPS, MEMBERS)
        return torch.where(made == 0, torch.ones_like(made), made) if nonzero else made
    info = torch.iinfo(dtype)
    rows = []
    for _ in range(GROUPS):
        center = draw(
            st.one_of(
                st.integers(max(info.min, -40), 40),
                st.integers(info.min, info.max),
                st.sampled_from([info.min, info.max, 0]),
            )
        )
        reach = draw(st.sampled_from([0, 1, 3, 20, info.max]))
        low, high = max(info.min, center - reach), min(info.max, center + reach)
        row = draw(st.lists(st.integers(low, high), min_size=MEMBERS, max_size=MEMBERS))
        rows.append([v or 1 for v in row] if nonzero else row)
    if draw(st.booleans()):  # all small: without this, one wild group makes every rule claim nothing
        rows = [[max(info.min, v % 50 - (20 if info.min else 0)) for v in row] for row in rows]
        rows = [[v or 1 for v in row] if nonzero else row for row in rows]
    return torch.tensor(rows, dtype=dtype)


def interval(values: torch.Tensor) -> Interval:
    """The tightest interval of each group."""
    if values.dtype == torch.bool:
        return Interval.boolean(values.all(1), values.any(1))
    if values.dtype in FLOAT_DTYPES:
        missing = values.isnan()
        lo = values.masked_fill(missing, math.inf).amin(1)
        hi = values.masked_fill(missing, -math.inf).amax(1)
        empty = missing.all(1)
        return Interval.floating(lo.masked_fill(empty, 0), hi.masked_fill(empty, 0), bool(missing.any()))
    whole = values.long()
    lo, hi = whole.amin(1), whole.amax(1)
    return Interval(lo, hi, values.dtype, lo.min().item(), hi.max().item())


def assert_encloses(claim: Interval, values: torch.Tensor) -> None:
    assert claim.dtype == values.dtype
    if values.dtype in INT_DTYPES:
        values = values.long()
    lo, hi = (x.expand(GROUPS)[:, None] for x in (claim.lo, claim.hi))
    if values.dtype == torch.bool:
        inside = (lo <= values) & (values <= hi)
    elif values.is_floating_point():
        inside = ((lo <= values) & (values <= hi)) | (values.isnan() & claim.nan)
        inside &= ((claim.least <= values.double()) & (values.double() <= claim.most)) | values.isnan()
    else:
        inside = (lo <= values) & (values <= hi) & (claim.least <= values) & (values <= claim.most)
    assert inside.all(), (claim, values)


def check(op, kwargs, *operands) -> None:
    """`operands` are groups of values or Python numbers."""
    try:
        values = op(*operands, **kwargs)
    except (RuntimeError, NotImplementedError):
        return  # torch has no such operation on these dtypes
    arguments = [interval(x) if isinstance(x, torch.Tensor) else x for x in operands]
    assert_encloses(bound(op, values.dtype, torch.device("cpu"), *arguments, **kwargs), values)


@pytest.mark.parametrize("case", BINARY, ids=name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_binary(case, data):
    op, kwargs = case
    dtypes = st.sampled_from(CASTS)
    a = data.draw(groups(data.draw(dtypes)))
    check(op, kwargs, a, data.draw(groups(data.draw(dtypes), nonzero="div" in str(op))))


@pytest.mark.parametrize("case", DIVISIONS, ids=name)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_division_with_either_sign(case, data):
    op, kwargs = case
    dtypes = st.sampled_from(INT_DTYPES)
    a = data.draw(groups(data.draw(dtypes)))
    least = torch.iinfo(a.dtype).min
    if least < -(2**15):  # the processor itself traps on the least value divided by -1
        a = torch.where(a == least, least + 1, a)
    check(op, kwargs, a, data.draw(groups(data.draw(dtypes), nonzero=True)))
    number = data.draw(st.sampled_from([-128, -7, -2, -1, 1, 3, 64, 127]))
    check(op, kwargs, a.long(), torch.full_like(a, number, dtype=torch.int64))


@pytest.mark.parametrize("case", BITWISE, ids=name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bitwise(case, data):
    dtypes = st.sampled_from((torch.bool, *INT_DTYPES))
    check(*case, data.draw(groups(data.draw(dtypes))), data.draw(groups(data.draw(dtypes))))


@pytest.mark.parametrize("case", SHIFTS, ids=name)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_shift_by_any_amount(case, data):
    dtype = data.draw(st.sampled_from(INT_DTYPES))
    a = data.draw(groups(dtype))
    amounts = st.one_of(
        st.integers(0, 3), st.integers(-3, 70) if dtype != torch.uint8 else st.integers(0, 70)
    )
    amount = [[data.draw(amounts)] * MEMBERS for _ in range(GROUPS)]
    check(*case, a, torch.tensor(amount, dtype=dtype))


@pytest.mark.parametrize("case", UNARY, ids=name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_unary(case, data):
    check(*case, data.draw(groups(data.draw(st.sampled_from(CASTS)))))


@pytest.mark.parametrize("case", [*ROUNDINGS, (aten.sqrt.default, {})], ids=name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_float_unary(case, data):
    check(*case, data.draw(groups(data.draw(st.sampled_from(FLOAT_DTYPES)))))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bitwise_not(data):
    check(
        aten.bitwise_not.default, {}, data.draw(groups(data.draw(st.sampled_from((torch.bool, *INT_DTYPES)))))
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_cast_between_any_two_dtypes(data):
    a = data.draw(groups(data.draw(st.sampled_from(CASTS))))
    target = data.draw(st.sampled_from(CASTS))
    check(aten._to_copy.default, {"dtype": target}, a)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_where(data):
    dtypes = st.sampled_from(CASTS)
    condition = data.draw(groups(torch.bool))
    check(
        aten.where.self,
        {},
        condition,
        data.draw(groups(data.draw(dtypes))),
        data.draw(groups(data.draw(dtypes))),
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_clamp(data):
    a = data.draw(groups(data.draw(st.sampled_from(CASTS))))
    limits = st.one_of(st.none(), st.integers(-50, 50), st.floats(-50, 50, width=32))
    low, high = data.draw(limits), data.draw(limits)
    if low is not None or high is not None:
        check(aten.clamp.default, {}, a, low, high)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_square_and_product_of_one_value_with_itself(data):
    a = data.draw(groups(data.draw(st.sampled_from((*INT_DTYPES, *FLOAT_DTYPES)))))
    check(aten.pow.Tensor_Scalar, {}, a, 2)
    x = interval(a)
    values = a * a
    assert_encloses(bound(aten.mul.Tensor, values.dtype, a.device, x, x), values)


SCALAR_OPS = [
    aten.add.Scalar,
    aten.sub.Scalar,
    aten.mul.Scalar,
    aten.rsub.Scalar,
    aten.div.Scalar,
    aten.remainder.Scalar,
    aten.fmod.Scalar,
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.lt.Scalar,
    aten.ge.Scalar,
    aten.bitwise_and.Scalar,
    aten.bitwise_xor.Scalar,
]


@pytest.mark.parametrize("op", SCALAR_OPS, ids=str)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_with_a_python_number(op, data):
    a = data.draw(groups(data.draw(st.sampled_from(CASTS))))
    if a.dtype == torch.int64:
        a = a.clamp(min=-(2**63) + 1)
    number = data.draw(
        st.one_of(
            st.integers(-130, 300), st.floats(-100, 100, width=64), st.sampled_from([0.1, -0.1, 2**31, True])
        )
    )
    if number == 0 and ("div" in str(op) or "mod" in str(op) or "remainder" in str(op)):
        return
    check(op, {}, a, number)


def test_every_rule_is_exercised():
    tested = {op.overloadpacket for op, _ in BINARY + DIVISIONS + BITWISE + SHIFTS + UNARY + ROUNDINGS}
    tested |= {op.overloadpacket for op in SCALAR_OPS}
    tested |= {aten.where, aten.clamp, aten.pow, aten.sqrt, aten._to_copy, aten.bitwise_not}
    assert set(RULES) == tested | OTHER_NAMES.keys()
    assert all(RULES[other] is RULES[op] for other, op in OTHER_NAMES.items())


def point(low: int, high: int, dtype: torch.dtype = torch.int64) -> Interval:
    return Interval(torch.tensor([low]), torch.tensor([high]), dtype, low, high)


@pytest.mark.parametrize(
    ("op", "operands", "expected"),
    [
        (aten.add.Tensor, [point(1, 5), point(-2, 3)], (-1, 8)),
        (aten.sub.Tensor, [point(1, 5), point(-2, 3)], (-2, 7)),
        (aten.mul.Tensor, [point(-3, 5), point(-2, 4)], (-12, 20)),
        (aten.abs.default, [point(-3, 2)], (0, 3)),
        (aten.abs.default, [point(-3, -2)], (2, 3)),
        (aten.floor_divide.default, [point(-7, 7), -2], (-4, 3)),
        (aten.floor_divide.default, [point(128, 255), 128], (1, 1)),
        (aten.remainder.Scalar, [point(130, 140), 128], (2, 12)),
        (aten.remainder.Scalar, [point(120, 140), 128], (0, 127)),
        (aten.remainder.Scalar, [point(3, 5), 128], (3, 5)),
        (aten.remainder.Scalar, [point(-3, 5), -4], (-3, 0)),
        (aten.fmod.Scalar, [point(-9, -8), 5], (-4, -3)),
        (aten.minimum.default, [point(1, 9), point(4, 5)], (1, 5)),
        (aten.clamp.default, [point(-5, 50), 0, 9], (0, 9)),
        (aten.bitwise_and.Scalar, [point(0, 100), 7], (0, 7)),
        (aten.bitwise_xor.Scalar, [point(5, 5), 3], (6, 6)),
        (aten.bitwise_right_shift.Tensor, [point(-9, 9), point(1, 2)], (-5, 4)),
        (aten.bitwise_left_shift.Tensor, [point(-3, 2), point(1, 3)], (-24, 16)),
        (aten.bitwise_not.default, [point(-3, 2)], (-3, 2)),
        (aten.pow.Tensor_Scalar, [point(-3, 2), 2], (0, 9)),
        (aten.lt.Scalar, [point(1, 3), 4], (True, True)),
        (aten.lt.Scalar, [point(1, 4), 4], (False, True)),
        (aten.ge.Scalar, [point(1, 3), 4], (False, False)),
        (aten.eq.Tensor, [point(4, 4), point(4, 4)], (True, True)),
        (aten.eq.Tensor, [point(4, 5), point(6, 7)], (False, False)),
        (aten.ne.Tensor, [point(4, 5), point(5, 7)], (False, True)),
    ],
    ids=str,
)
def test_bounds_are_as_tight_as_they_can_be(op, operands, expected):
    dtype = torch.bool if isinstance(expected[0], bool) else torch.int64
    claim = bound(op, dtype, torch.device("cpu"), *operands)
    assert (claim.lo.item(), claim.hi.item()) == expected


def test_truncated_quotients_near_zero():
    claim = bound(
        aten.div.Tensor_mode, torch.int64, torch.device("cpu"), point(-3, -1), 4, rounding_mode="trunc"
    )
    assert (claim.least, claim.lo.item(), claim.hi.item(), claim.most) == (0, 0, 0, 0)


def test_nan_is_true_and_compares_as_false():
    zero_or_nan = Interval(torch.zeros(1), torch.zeros(1), torch.float32, 0.0, 0.0, nan=True)
    device = torch.device("cpu")
    assert bound(aten._to_copy.default, torch.bool, device, zero_or_nan, dtype=torch.bool).hi.item()
    assert not bound(aten.ge.Scalar, torch.bool, device, zero_or_nan, 0).lo.item()
    assert bound(aten.ne.Scalar, torch.bool, device, zero_or_nan, 0).hi.item()


@pytest.mark.parametrize(
    ("op", "operands", "dtype"),
    [
        (aten.add.Tensor, [point(100, 120, torch.int8), point(0, 8, torch.int8)], torch.int8),
        (aten.sub.Tensor, [point(0, 5, torch.uint8), point(0, 1, torch.uint8)], torch.uint8),
        (aten.neg.default, [point(-128, 0, torch.int8)], torch.int8),
        (aten.mul.Tensor, [point(0, 2**40), point(0, 2**40)], torch.int64),
        (aten.floor_divide.default, [point(-(2**63), 0), -1], torch.int64),
        (aten.bitwise_left_shift.Tensor, [point(1, 1), point(0, 64)], torch.int64),
        (aten.floor_divide.default, [point(0, 9), point(-1, 1)], torch.int64),
        (aten._to_copy.default, [point(0, 300)], torch.uint8),
        (aten.exp.default, [point(0, 3)], torch.float32),
    ],
    ids=str,
)
def test_nothing_is_claimed_where_values_could_wrap(op, operands, dtype):
    kwargs = {"dtype": dtype} if op is aten._to_copy.default else {}
    claim = bound(op, dtype, torch.device("cpu"), *operands, **kwargs)
    whole = Interval.unknown(dtype, torch.device("cpu"))
    assert (claim.least, claim.most) == (whole.least, whole.most)
    assert claim.lo.item() == whole.lo.item()


def test_promotion_follows_the_default_dtype_of_the_moment():
    half = lambda: bound(aten.mul.Tensor, torch.get_default_dtype(), torch.device("cpu"), point(1, 3), 0.5)  # noqa: E731
    assert half().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert half().dtype == torch.float64 and half().most == 1.5
    finally:
        torch.set_default_dtype(torch.float32)
